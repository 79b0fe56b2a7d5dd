// grad: gradients of q, k, the gates and beta, chunk by chunk, from the state S before a chunk, the adjoint dS' after it, Vn and dV.
//
// Grid: persistent blocks, static stride over `steps`, chunks and q/k heads; the GROUP value heads of a q/k head are summed in head order in fp32
// and dq, dk are stored once. Block: 512 threads = 4 warpgroups:
//   0, 1 64 of the 128 key columns each: dQ = s gam (dO S^T), dK = e (Vn dS'^T) - gam (dV S^T), and their products with q and k;
//        at the end of a group dQ += dP K, dK += dP^T Q + (N' + N'^T) K
//   2    token pairs: dP = s (dO Vn^T) o D, N' = -strict((dV Vn^T) o D), summed over the group, and what of dP o Q K^T + N' o K K^T
//        crosses each token
//   3    warp 0 copies ahead, warp 1 makes the scalars and writes the gradients of gate and beta
// The gradient of the raw gate is what flows across a token t, so that nothing large cancels (docs/design.md):
//   dg_t = sum_{i>=t} (q.dQ + k.dK_read)_i + sum_{j<t} (k.dK_write)_j + sum_{j<t<=i} E_ij + gam_C <S, dS'>
// What a state or an adjoint that is zero would add is left out.
// Reads per chunk and value head: 32 KB each of S and dS', 16 KB each of Vn, dV, dO; 32 KB of q, k per group, as much written.
#include "grad_pairs.cuh"

// ---- warpgroups 0 and 1: keys ---------------------------------------------------------------------------------------
// acc = A B^T: A [64 x 128] a tile of tokens, B 64 rows of a [2][128 rows][64] image.
__device__ __forceinline__ void tile_image(float (&acc)[32], const char* tile, const char* image, int half) {
    const u64 left = descriptor(fresh_addr(tile), 1, 64), right = descriptor(fresh_addr(image) + half * 64 * 128, 1, 64);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u64 a = left + (i / 4 * HALF + i % 4 * 32) / 16, b = right + (i / 4 * (IMAGE / 2) + i % 4 * 32) / 16;
        if (i) wgmma_ss64(acc, a, b, 1); else wgmma_ss64_new(acc, a, b);
    }
    wgmma_commit();
}

// sum += diag(w) acc, and the products of its rows with the rows of q or k (this half's columns), over the quad of lanes.
__device__ __forceinline__ float2 add_rows(float (&sum)[32], const float (&acc)[32], const char* rows, float w0, float w1, int t) {
    const u32 at = fresh_addr(rows) + swizzled(t / 32 * 16 + t % 32 / 4, t % 4 * 4);  // other units of 16 bytes: XOR
    float dot0 = 0.f, dot1 = 0.f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const u32 x = load_shared(at ^ (j * 16)), y = load_shared((at ^ (j * 16)) + 1024);
        const float a = acc[j * 4] * w0, b = acc[j * 4 + 1] * w0, c = acc[j * 4 + 2] * w1, d = acc[j * 4 + 3] * w1;
        dot0 += low_half(x) * a + high_half(x) * b, dot1 += low_half(y) * c + high_half(y) * d;
        sum[j * 4] += a, sum[j * 4 + 1] += b, sum[j * 4 + 2] += c, sum[j * 4 + 3] += d;
    }
    for (int d = 1; d < 4; d *= 2) dot0 += __shfl_xor_sync(~0u, dot0, d), dot1 += __shfl_xor_sync(~0u, dot1, d);
    return make_float2(dot0, dot1);
}

// <S, dS'> over this warpgroup's half of the images.
__device__ __forceinline__ float carried(const GradSmem& sm, int s, int half, int t) {
    float sum = 0.f;
#pragma unroll 4
    for (int i = 0; i < 8; i++) {
        const int at = half * (IMAGE / 2) + (i * 128 + t) * 16;
        const uint4 x = *reinterpret_cast<const uint4*>(sm.s[s] + at), y = *reinterpret_cast<const uint4*>(sm.ds + at);
        sum += low_half(x.x) * low_half(y.x) + high_half(x.x) * high_half(y.x) + low_half(x.y) * low_half(y.y) + high_half(x.y) * high_half(y.y);
        sum += low_half(x.z) * low_half(y.z) + high_half(x.z) * high_half(y.z) + low_half(x.w) * low_half(y.w) + high_half(x.w) * high_half(y.w);
    }
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    return sum;
}

__device__ __forceinline__ void key_step(const GradParams& p, GradSmem& sm, const Place& at, float (&dQ)[32], float (&dK)[32], int half, int t) {
    const int s = at.step & 1, lane = t % 32, r = t / 32 * 16 + lane / 4;
    const Scalars& scalar = sm.scalars[s];
    RowSums& sums = sm.sums[s];
    const bool state = !(at.zero & NO_STATE), adjoint = !(at.zero & NO_ADJOINT);
    float2 read = make_float2(0.f, 0.f), more = read, written = read;
    float acc[32], sum = 0.f;
    wait_loaded(sm, DOUT, at.step), wait_loaded(sm, S0 + s, at.step / 2);
    if (state) wgmma_fence(), tile_image(acc, sm.dout, sm.s[s], half);
    wait_loaded(sm, QK, at.item);
    barrier_wait(&sm.scalars_ready[s], at.step / 2 & 1);
    barrier_wait(&sm.sums_free[s], (at.step / 2 & 1) ^ 1);
    const float gam0 = scalar.gam[r], gam1 = scalar.gam[r + 8];
    wgmma_wait<0>();
    release(sm, DOUT, t);
    if (state) read = add_rows(dQ, acc, sm.q + half * HALF, gam0 * p.scale, gam1 * p.scale, t);
    wait_loaded(sm, DV, at.step);
    if (state) wgmma_fence(), tile_image(acc, sm.dv, sm.s[s], half);
    wait_loaded(sm, DS, at.step);
    if (state && adjoint) sum = carried(sm, s, half, t);
    wgmma_wait<0>();
    release(sm, DV, t), release(sm, S0 + s, t);
    if (state) more = add_rows(dK, acc, sm.k + half * HALF, -gam0, -gam1, t);
    if (lane % 4 == 0) sums.read[half][r] = read.x + more.x, sums.read[half][r + 8] = read.y + more.y;
    wait_loaded(sm, VN0 + s, at.step / 2);
    if (adjoint) wgmma_fence(), tile_image(acc, sm.vn[s], sm.ds, half);
    wgmma_wait<0>();
    release(sm, VN0 + s, t), release(sm, DS, t);
    if (adjoint) written = add_rows(dK, acc, sm.k + half * HALF, scalar.e[r], scalar.e[r + 8], t);
    if (lane % 4 == 0) sums.written[half][r] = written.x, sums.written[half][r + 8] = written.y;
    if (lane == 0) sums.carried[half * 4 + t / 32] = sum;
    __syncwarp();
    if (lane == 0) barrier_arrive(&sm.sums_ready[s]);
}

__device__ __forceinline__ void copy_rows(__nv_bfloat16* out, const char* tile, const Place& at, int stride, int half, int t) {
    for (int i = t; i < at.chunk.y * 8; i += 128)
        *reinterpret_cast<uint4*>(out + (static_cast<long long>(at.chunk.x) + i / 8) * stride + at.head * K + half * 64 + i % 8 * 8) =
            *reinterpret_cast<const uint4*>(tile + swizzled(i / 8, i % 8 * 16));
}

// dQ += dP K, dK += dP^T Q + (N' + N'^T) K, the sum in brackets one tile.
__device__ __forceinline__ void add_pairs(GradSmem& sm, const Place& at, float (&dQ)[32], float (&dK)[32], int half, int t) {
    barrier_wait(&sm.pairs_ready, at.step & 1);
    const u64 dp = descriptor(fresh_addr(sm.pairs[0]), 1, 64), n = dp + SQUARE / 16;
    const u64 q = descriptor(fresh_addr(sm.q) + half * HALF, 1, 64), k = q + TILE / 16;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wgmma_ss64_mn<0>(dQ, dp + i * 2, k + i * 128);
        wgmma_ss64_mn<1>(dK, dp + i * 128, q + i * 128);
        wgmma_ss64_mn<0>(dK, n + i * 2, k + i * 128);
    }
    wgmma_commit();
    wgmma_wait<0>();
    if (t % 32 == 0) barrier_arrive(&sm.pairs_free);
}

// y . dy of this half's columns of every row, for both halves to see.
__device__ __forceinline__ void dot_along(float* out, const float (&x)[32], const char* rows, int t) {
    const u32 at = fresh_addr(rows) + swizzled(t / 32 * 16 + t % 32 / 4, t % 4 * 4);
    float dot[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const u32 y = load_shared((at ^ (i / 2 * 16)) + i % 2 * 1024);
        dot[i % 2] += low_half(y) * x[i * 2] + high_half(y) * x[i * 2 + 1];
    }
    for (int i = 0; i < 2; i++) {
        for (int d = 1; d < 4; d *= 2) dot[i] += __shfl_xor_sync(~0u, dot[i], d);
        if (t % 4 == 0) out[t / 32 * 16 + t % 32 / 4 + i * 8] = dot[i];
    }
}
// dx = r (dy - y (y . dy)) of y = r x.
__device__ __forceinline__ void norm_backward(float (&x)[32], const float (&along)[2][C], const char* rows, const float* rstd, int count, int t) {
    const u32 at = fresh_addr(rows) + swizzled(t / 32 * 16 + t % 32 / 4, t % 4 * 4);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int row = t / 32 * 16 + t % 32 / 4 + i % 2 * 8;
        const float dot = along[0][row] + along[1][row], r = row < count ? rstd[row] : 0.f;
        const u32 y = load_shared((at ^ (i / 2 * 16)) + i % 2 * 1024);
        x[i * 2] = r * (x[i * 2] - low_half(y) * dot), x[i * 2 + 1] = r * (x[i * 2 + 1] - high_half(y) * dot);
    }
}
__device__ __forceinline__ void norms_backward(const GradParams& p, GradSmem& sm, const Place& at, float (&dQ)[32], float (&dK)[32], int half, int t) {
    const char *q = sm.q + half * HALF, *k = sm.k + half * HALF;
    dot_along(sm.along[0][half], dQ, q, t), dot_along(sm.along[1][half], dK, k, t);
    named_barrier<5, 256>();
    const float* rstd = p.rstd + static_cast<long long>(at.head) * p.tokens + at.chunk.x;
    norm_backward(dQ, sm.along[0], q, rstd, at.chunk.y, t);
    norm_backward(dK, sm.along[1], k, rstd + static_cast<long long>(p.value_heads / GROUP) * p.tokens, at.chunk.y, t);
}

// One half of dq and dk through the tiles of q and k, whose columns of this half only this warpgroup still reads.
__device__ __forceinline__ void finish_group(const GradParams& p, GradSmem& sm, const Place& at, float (&dQ)[32], float (&dK)[32], int half, int t) {
    char *q = sm.q + half * HALF, *k = sm.k + half * HALF;
    if (L2NORM) norms_backward(p, sm, at, dQ, dK, half, t);
    half_barrier(half);
    store_tile(q, dQ, t), store_tile(k, dK, t);
    fence_async();
    half_barrier(half);
    if (at.chunk.y < C) {
        copy_rows(p.dq, q, at, p.row, half, t), copy_rows(p.dk, k, at, p.row, half, t);
        half_barrier(half);
    } else if (t == 0) {
        tma_store(&p.dq_map, q, half * 64, at.head, at.chunk.x), tma_store(&p.dk_map, k, half * 64, at.head, at.chunk.x);
        bulk_wait_read<0>();
    }
    release(sm, QK, t);
}

__device__ __forceinline__ void keys(const GradParams& p, GradSmem& sm, int half, int t) {
    float dQ[32], dK[32];
    int meetings = 0;
    each_step(p, [&](const Place& at, int member) {
        if (member == 0)
#pragma unroll
            for (int i = 0; i < 32; i++) dQ[i] = 0.f, dK[i] = 0.f;
        ready_tiles(p, sm, at, member, meetings);
        key_step(p, sm, at, dQ, dK, half, t);
        add_pairs(sm, at, dQ, dK, half, t);
        if (member == GROUP - 1) finish_group(p, sm, at, dQ, dK, half, t);
    });
    if (t == 0) bulk_wait<0>();
}

extern "C" __device__ const int shared_bytes = sizeof(GradSmem);  // asked for at the launch

extern "C" __global__ void __launch_bounds__(512, 1) grad(const __grid_constant__ GradParams p) {
    extern __shared__ __align__(1024) char raw[];
    GradSmem& sm = *reinterpret_cast<GradSmem*>(raw);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), t = threadIdx.x % 128;
    if (threadIdx.x == 0) init_barriers(sm);
    __syncthreads();
    if (warpgroup == 3) {
        registers_dec<HELPER_REGISTERS>();
        if (t == 0) copies(p, sm);
        if (t / 32 == 1) gates(p, sm, t % 32);
    } else {
        registers_inc<WORKER_REGISTERS>();
        if (warpgroup == 2) pairs(p, sm, t); else keys(p, sm, warpgroup, t);
    }
}
