// adjoint: the walk's mirror over the chunks of one segment and value head, from the last to the first:
//   dVn = P^T dO + e K dS',  dV = T^T dVn,  dS = gam_C dS' + (s gam Q)^T dO - (gam K)^T dV
//
// Grid: one block per item (segments and a value head, longest first). Block: 384 threads, roles as in tiles.cuh; v is dO.
// EMIT: dv of every token, and the adjoint dS' after each chunk for `grad`. Without it the end state is the segment's offset Bt.
// Reads per chunk: 16 KB each of k, q, dO, 8 KB each of N and Q K^T, gates; writes 32 KB of dS' and 16 KB of dv.
#ifndef EMIT
#define EMIT 1
#endif
#define HAS_Q 1
#define SUMMARY (!EMIT)
#define REVERSE 1
#include "tiles.cuh"

struct alignas(1024) AdjointSmem {
    Tiles tiles;
    char image[2][IMAGE / 2];
    Signals signals;
};

// X = e X per token column, and the operands (s gam dO)^T.
__device__ __forceinline__ void scale_reads(float (&X)[32], u32 (&to_state)[16], const u32 (&dout)[16], const Scalars& scalar, int t) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int token = i / 2 * 8 + t % 4 * 2;
        const float2 e = *reinterpret_cast<const float2*>(&scalar.write_k[token]), gam = *reinterpret_cast<const float2*>(&scalar.read_q[token]);
        X[i * 2] *= e.x, X[i * 2 + 1] *= e.y;
        to_state[i] = pack(low_half(dout[i]) * gam.x, high_half(dout[i]) * gam.y);
    }
}

// dv goes out through this warp's own columns of the dO tile, which it has read; the stage is free once the copy has been read.
__device__ __forceinline__ void emit_dv(const WalkParams& p, AdjointSmem& sm, const float (&dV)[32], const Item& item, int s, int2 chunk, int half, int t) {
    char* tile = sm.tiles.v[s] + half * HALF;
    u32 x[16];
    pack_all(x, dV);
    store_transposed<C>(tile, x, t);
    emit_rows(p, tile, item, chunk, half, t);
}

// The stage and the image of the chunk before are free once their copies have been read.
__device__ __forceinline__ void free_previous(AdjointSmem& sm, int c, int half, int t) {
    if (t == 0) {
        bulk_wait_read<0>();
        if (c > 0) barrier_arrive(&sm.signals.free[(c - 1) % STAGES]);
    }
    half_barrier(half);
}

// dVn^T = X diag(e) + dO^T P and dS^T = gam_C dS'^T + (s gam dO)^T Q, under way.
__device__ __forceinline__ void add_outputs(const Tiles& tiles, int s, float (&X)[32], float (&dS)[64], const u32 (&dout)[16], const u32 (&to_state)[16], float decay) {
    const u32 q = smem_addr(tiles.q[s]), pp = smem_addr(tiles.p[s]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_rs64_mn(X, dout + i * 4, descriptor(pp + i * 2048, 1, 64), 1);
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < 64; i++) dS[i] *= decay;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_rs128_mn(dS, to_state + i * 4, descriptor(q + i * 2048, HALF / 16, 64));
    wgmma_commit();
}

// dV^T = dVn^T T, then dS^T -= (gam dV)^T K, under way.
__device__ __forceinline__ void take_writes(const Tiles& tiles, int s, float (&dV)[32], float (&dS)[64], const float (&X)[32], const Scalars& scalar, int t) {
    const u32 k = smem_addr(tiles.k[s]), tt = smem_addr(tiles.t[s]);
    u32 y[16], taken[16];
    pack_all(y, X);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_rs64_mn(dV, y + i * 4, descriptor(tt + i * 2048, 1, 64), i > 0);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 gam = *reinterpret_cast<const float2*>(&scalar.read_k[i / 2 * 8 + t % 4 * 2]);
        taken[i] = pack(-dV[i * 2] * gam.x, -dV[i * 2 + 1] * gam.y);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_rs128_mn(dS, taken + i * 4, descriptor(k + i * 2048, HALF / 16, 64));
    wgmma_commit();
}

__device__ __forceinline__ void adjoint_chunk(const WalkParams& p, AdjointSmem& sm, float (&dS)[64], const Item& item, int c, bool zero, int half, int t) {
    const int s = c % STAGES;
    const Scalars& scalar = sm.signals.scalars[s];
    const u32 k = smem_addr(sm.tiles.k[s]);
    u32 state[32], dout[16], to_state[16];
    float X[32], dV[32];
#pragma unroll
    for (int i = 0; i < 32; i++) state[i] = pack(dS[2 * i], dS[2 * i + 1]);
    barrier_wait(&sm.signals.ready[s], c / STAGES & 1);
    wgmma_fence();  // X = dS'^T K^T
#pragma unroll
    for (int i = 0; i < 8; i++) wgmma_rs64(X, state + i * 4, descriptor(k + i / 4 * HALF + i % 4 * 32, 1, 64), i > 0);
    wgmma_commit();
    load_transposed(dout, sm.tiles.v[s] + half * HALF, t);
    wgmma_wait<0>();
    scale_reads(X, to_state, dout, scalar, t);
    add_outputs(sm.tiles, s, X, dS, dout, to_state, scalar.decay);
#if EMIT
    free_previous(sm, c, half, t);
    if (!zero) emit_state(p, sm.image[half], state, item, c, half, t);
#endif
    wgmma_wait<1>();
    take_writes(sm.tiles, s, dV, dS, X, scalar, t);
#if EMIT
    emit_dv(p, sm, dV, item, s, scalar.chunk, half, t);
#endif
    wgmma_wait<0>();
    if (EMIT ? t % 32 == 0 && t > 0 : t % 32 == 0) barrier_arrive(&sm.signals.free[s]);  // every warp: a product is done warp by warp
}

extern "C" __device__ const int shared_bytes = sizeof(AdjointSmem);  // asked for at the launch

extern "C" __global__ void __launch_bounds__(384, 1) adjoint(const __grid_constant__ WalkParams p) {
    run_item<AdjointSmem>(p, [&](AdjointSmem& sm, float (&dS)[64], const Item& item, int c, bool zero, int half, int t) { adjoint_chunk(p, sm, dS, item, c, zero, half, t); });
}
