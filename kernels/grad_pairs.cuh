// Warpgroup 2 of `grad`: what pairs of tokens of a chunk contribute.
#pragma once
#include <cuda_fp16.h>
#include "grad_steps.cuh"

// X Y^T, both [64 x 128] tiles of tokens.
__device__ __forceinline__ void tile_tile(float (&acc)[32], const char* x, const char* y) {
    const u64 left = descriptor(fresh_addr(x), 1, 64), right = descriptor(fresh_addr(y), 1, 64);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u64 a = left + (i / 4 * HALF + i % 4 * 32) / 16, b = right + (i / 4 * HALF + i % 4 * 32) / 16;
        if (i) wgmma_ss64(acc, a, b, 1); else wgmma_ss64_new(acc, a, b);
    }
    wgmma_commit();
}

// Fragments of a [64 x 64] matrix: value i is in row fragment_row(i), column fragment_column(i).
__device__ __forceinline__ int fragment_row(int i, int t) { return t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8; }
__device__ __forceinline__ int fragment_column(int i, int t) { return i / 4 * 8 + t % 4 * 2 + i % 2; }

// One step of summing over the lanes that share columns: each side keeps half of the column tiles.
template <int TILES> __device__ __forceinline__ void fold_tiles(float (&x)[16], int mask, int lane) {
#pragma unroll
    for (int i = 0; i < TILES * 2; i++) {
        const float low = x[i], high = x[i + TILES * 2];
        x[i] = (lane & mask ? high : low) + __shfl_xor_sync(~0u, lane & mask ? low : high, mask);
    }
}

// before[n][..] += sum over j < t of E_ij for the tokens t of column tile n: products with a triangle of ones, in tf32. The eight
// columns j of a product are taken as 0 2 4 6 1 3 5 7, which is how a fragment of E holds them.
__device__ __forceinline__ void sum_earlier(float (&before)[8][4], const float (&E)[32], int lane) {
    const int quad = lane % 4;
    const u32 one = __float_as_uint(1.f), even = quad * 2 < lane / 4 ? one : 0, odd = quad * 2 + 1 < lane / 4 ? one : 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const u32 e[4] = {round_tf32(E[k * 4]), round_tf32(E[k * 4 + 2]), round_tf32(E[k * 4 + 1]), round_tf32(E[k * 4 + 3])};
#pragma unroll
        for (int n = k; n < 8; n++) mma_tf32(before[n], e, n == k ? even : one, n == k ? odd : one);
    }
}

// Per token t the sum over this warp's rows i >= t of what came from tokens before t.
__device__ __forceinline__ void store_crossing(float* out, const float (&before)[8][4], int t) {
    const int lane = t % 32, row = t / 32 * 16 + lane / 4, quad = lane % 4;
    float sum[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int token = i / 2 * 8 + quad * 2 + i % 2;
        sum[i] = (row >= token ? before[i / 2][i % 2] : 0.f) + (row + 8 >= token ? before[i / 2][i % 2 + 2] : 0.f);
    }
    fold_tiles<4>(sum, 16, lane), fold_tiles<2>(sum, 8, lane), fold_tiles<1>(sum, 4, lane);
    *reinterpret_cast<float2*>(out + (lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2) * 8 + quad * 2) = make_float2(sum[0], sum[1]);
}

// Q K^T and K K^T of a group, in fp16.
struct GroupPairs { u32 scores[16], keys[16]; };

__device__ __forceinline__ void pack_half(u32 (&out)[16], const float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const __half2 pair = __floats2half2_rn(x[i * 2], x[i * 2 + 1]);
        out[i] = *reinterpret_cast<const u32*>(&pair);
    }
}
__device__ __forceinline__ void group_products(GradSmem& sm, const Place& at, GroupPairs& group) {
    float X[32];
    wait_loaded(sm, QK, at.item);
    wgmma_fence();
    tile_tile(X, sm.q, sm.k);
    wgmma_wait<0>();
    pack_half(group.scores, X);
    wgmma_fence();
    tile_tile(X, sm.k, sm.k);
    wgmma_wait<0>();
    pack_half(group.keys, X);
}

// N' + N'^T as a tile: 8 x 8 blocks below the diagonal and their mirror images.
__device__ __forceinline__ void store_symmetric(char* tile, const float (&x)[32], int t) {
    const u32 lane_at = swizzled(t % 32 / 4, t % 4 * 4), base = fresh_addr(tile) + lane_at;  // other units of 16 bytes: XOR
    const int row_block = t / 32 * 2;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int row = row_block + i % 2, column = i / 2;
        const u32 own = pack(x[i * 2], x[i * 2 + 1]), mirror = transpose8x8(own);
        if (column <= row) store_shared((base ^ (column * 16)) + row * 1024, column == row ? own | mirror : own);
        if (column < row) store_shared((base ^ (row * 16)) + column * 1024, mirror);
    }
}

// SCORES: dP, and E = dP o Q K^T. Else N' = -strict((dV Vn^T) o D), E += N' o K K^T, and dV_i . Vn_i.
template <bool SCORES> __device__ __forceinline__ void pair_products(const GradParams& p, GradSmem& sm, const Place& at, const u32 (&group)[16], float (&E)[32], int t) {
    const int s = at.step & 1;
    wait_loaded(sm, SCORES ? DOUT : DV, at.step);
    float X[32];
    wgmma_fence();
    tile_tile(X, SCORES ? sm.dout : sm.dv, sm.vn[s]);
    if (SCORES) barrier_wait(&sm.scalars_ready[s], at.step / 2 & 1);
    const float *scan = sm.scalars[s].scan, row_scan[2] = {scan[fragment_row(0, t)], scan[fragment_row(2, t)]};
    wgmma_wait<0>();
    release(sm, SCORES ? DOUT : DV, t);
    if (!SCORES) release(sm, VN0 + s, t);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int r = fragment_row(i, t), m = fragment_column(i, t);
        const float decay = exp2_approx(row_scan[i / 2 % 2] - scan[m]);
        const float2 product = __half22float2(*reinterpret_cast<const __half2*>(&group[i / 2]));
        if (!SCORES && r == m) sm.sums[s].diagonal[r] = X[i];
        X[i] = SCORES ? (r >= m ? X[i] * decay * p.scale : 0.f) : (r > m ? -X[i] * decay : 0.f);
        const float crossing = r > m ? X[i] * (i % 2 ? product.y : product.x) : 0.f;
        E[i] = SCORES ? crossing : E[i] + crossing;
    }
    if (SCORES) barrier_wait(&sm.pairs_free, (at.step & 1) ^ 1);
    if (SCORES) store_tile(sm.pairs[0], X, t); else store_symmetric(sm.pairs[1], X, t);
}

__device__ __forceinline__ void pairs(const GradParams& p, GradSmem& sm, int t) {
    GroupPairs group;
    int meetings = 0;
    each_step(p, [&](const Place& at, int member) {
        const int s = at.step & 1;
        ready_tiles(p, sm, at, member, meetings);
        if (member == 0) group_products(sm, at, group);
        wait_loaded(sm, VN0 + s, at.step / 2);
        float E[32], before[8][4] = {};
        pair_products<true>(p, sm, at, group.scores, E, t);
        barrier_wait(&sm.sums_free[s], (at.step / 2 & 1) ^ 1);
        pair_products<false>(p, sm, at, group.keys, E, t);
        fence_async();
        barrier_arrive(&sm.pairs_ready);
        if (member == GROUP - 1) release(sm, QK, t);
        sum_earlier(before, E, t % 32);
        store_crossing(sm.sums[s].crossing[t / 32], before, t);
        __syncwarp();
        if (t % 32 == 0) barrier_arrive(&sm.sums_ready[s]);
    });
}
