// walk: the recurrence over the chunks of one segment and value head, S' = gam_C S + (e K)^T Vn, Vn = T (V - diag(gam) K S).
//
// Grid: one block per item (segments and a value head, longest first). Block: 384 threads, roles as in tiles.cuh.
// EMIT_O: o of every token. EMIT_S: the state before each chunk and Vn, for a backward. Neither: summaries, the end state from zero (or
// an initial state), B, and without v, from the identity, M. All run the same recurrence: a state has the same bits in each.
// Reads per chunk: 16 KB of k (and q, v), 8 KB of N (and Q K^T), gates; writes 16 KB of o, or 32 KB of S and 16 KB of Vn.
#ifndef EMIT_O
#define EMIT_O 1
#endif
#ifndef EMIT_S
#define EMIT_S 0
#endif
#define HAS_Q EMIT_O
#define SUMMARY (!EMIT_O && !EMIT_S)
#define REVERSE 0
#include "tiles.cuh"

struct alignas(1024) WalkSmem {
    Tiles tiles;
#if EMIT_S
    char image[2][IMAGE / 2];
#endif
    char out[2][HALF];  // o or Vn
    Signals signals;
};

// O^T or Vn^T of one half: the tile is free once its last copy has been read.
__device__ __forceinline__ void emit_output(const WalkParams& p, WalkSmem& sm, const u32 (&x)[16], const Item& item, int c, int2 chunk, int half, int t) {
    char* tile = sm.out[half];
    if (t == 0) bulk_wait_read<0>();
    half_barrier(half);
    store_transposed<C>(tile, x, t);
    if (EMIT_O) return emit_rows(p, tile, item, chunk, half, t);
    fence_async();
    half_barrier(half);
    if (t == 0) bulk_store(p.values + (place_of(p, item, c) * 2 + half) * HALF, tile, chunk.y * 128);
}

// W^T = V^T - U diag(gam), as an operand.
__device__ __forceinline__ void residual(u32 (&w)[16], const u32 (&values)[16], const float (&U)[32], const Scalars& scalar, int t) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 gam = *reinterpret_cast<const float2*>(&scalar.read_k[i / 2 * 8 + t % 4 * 2]);
        w[i] = pack(low_half(values[i]) - gam.x * U[i * 2], high_half(values[i]) - gam.y * U[i * 2 + 1]);
    }
}

// U = S^T K^T and O = S^T Q^T, under way.
__device__ __forceinline__ void read_state(const Tiles& tiles, int s, const u32 (&state)[32], float (&U)[32], float (&O)[32]) {
    const u32 k = smem_addr(tiles.k[s]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; i++) wgmma_rs64(U, state + i * 4, descriptor(k + i / 4 * HALF + i % 4 * 32, 1, 64), i > 0);
    wgmma_commit();
#if EMIT_O
    const u32 q = smem_addr(tiles.q[s]);
#pragma unroll
    for (int i = 0; i < 8; i++) wgmma_rs64(O, state + i * 4, descriptor(q + i / 4 * HALF + i % 4 * 32, 1, 64), i > 0);
    wgmma_commit();
#endif
}

// (e Vn)^T as an operand, O^T scaled by its gates.
__device__ __forceinline__ void scale_tokens(u32 (&scaled)[16], float (&O)[32], const float (&X)[32], const Scalars& scalar, int t) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int token = i / 2 * 8 + t % 4 * 2;
        const float2 e = *reinterpret_cast<const float2*>(&scalar.write_k[token]);
        scaled[i] = pack(X[i * 2] * e.x, X[i * 2 + 1] * e.y);
        if (EMIT_O) {
            const float2 gam = *reinterpret_cast<const float2*>(&scalar.read_q[token]);
            O[i * 2] *= gam.x, O[i * 2 + 1] *= gam.y;
        }
    }
}

// S^T += (e Vn)^T K and O^T += Vn^T P^T, under way.
__device__ __forceinline__ void write_state(const Tiles& tiles, int s, float (&S)[64], float (&O)[32], const u32 (&scaled)[16], const u32 (&plain)[16]) {
    const u32 k = smem_addr(tiles.k[s]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_rs128_mn(S, scaled + i * 4, descriptor(k + i * 2048, HALF / 16, 64));
    wgmma_commit();
#if EMIT_O
    const u32 pp = smem_addr(tiles.p[s]);
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_rs64(O, plain + i * 4, descriptor(pp + i * 32, 1, 64), 1);
    wgmma_commit();
#endif
}

// X = W^T T^T = Vn^T, while the state decays.
__device__ __forceinline__ void solve(const Tiles& tiles, int s, float (&X)[32], float (&S)[64], const u32 (&w)[16], float decay) {
    const u32 tt = smem_addr(tiles.t[s]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_rs64(X, w + i * 4, descriptor(tt + i * 32, 1, 64), i > 0);
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < 64; i++) S[i] *= decay;
    wgmma_wait<0>();
}

__device__ __forceinline__ void state_chunk(const WalkParams& p, WalkSmem& sm, float (&S)[64], const Item& item, int c, bool zero, int half, int t) {
    const int s = c % STAGES;
    const Scalars& scalar = sm.signals.scalars[s];
    u32 state[32], values[16] = {}, w[16], plain[16], scaled[16];
    float U[32], O[32], X[32];
#pragma unroll
    for (int i = 0; i < 32; i++) state[i] = pack(S[2 * i], S[2 * i + 1]);
    barrier_wait(&sm.signals.ready[s], c / STAGES & 1);
    read_state(sm.tiles, s, state, U, O);
    if (has_v(item)) load_transposed(values, sm.tiles.v[s] + half * HALF, t);
    wgmma_wait<EMIT_O>();
#if EMIT_S
    if (t == 0) bulk_wait_read<0>();
    half_barrier(half);
    if (!zero) emit_state(p, sm.image[half], state, item, c, half, t);
#endif
    residual(w, values, U, scalar, t);
    solve(sm.tiles, s, X, S, w, scalar.decay);
    if (EMIT_O || EMIT_S) pack_all(plain, X);
    scale_tokens(scaled, O, X, scalar, t);
    write_state(sm.tiles, s, S, O, scaled, plain);
#if EMIT_S
    emit_output(p, sm, plain, item, c, scalar.chunk, half, t);
#endif
    wgmma_wait<0>();
#if EMIT_O
    const int2 chunk = scalar.chunk;
#endif
    if (t % 32 == 0) barrier_arrive(&sm.signals.free[s]);  // every warp: a product is done warp by warp
#if EMIT_O
    pack_all(plain, O);
    emit_output(p, sm, plain, item, c, chunk, half, t);
#endif
}

extern "C" __device__ const int shared_bytes = sizeof(WalkSmem);  // asked for at the launch

extern "C" __global__ void __launch_bounds__(384, 1) walk(const __grid_constant__ WalkParams p) {
    run_item<WalkSmem>(p, [&](WalkSmem& sm, float (&S)[64], const Item& item, int c, bool zero, int half, int t) { state_chunk(p, sm, S, item, c, zero, half, t); });
}
