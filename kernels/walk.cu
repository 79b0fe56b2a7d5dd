// walk: the recurrence over the chunks of one segment and value head, S' = gam_C S + (e K)^T Vn, Vn = T (V - diag(gam) K S).
//
// Grid: one block per item (a segment and a value head, longest first). Block: 384 threads = 3 warpgroups:
//   0    copies (thread 0, two chunks ahead) and scalars: gate scan; turns N into T = diag b - diag b (N o D) diag b and
//        Q K^T into P = s (Q K^T) o D where they lie in shared memory
//   1, 2 state: S^T in registers, 64 of the 128 state columns each, fp32; bf16 as product operand
// Variants: EMIT_O (o for every token), HAS_V = 0 (no v: the map M is the walk from the identity).
// Reads per chunk: 16 KB each of k, q, v, 8 KB of N, gates; writes 16 KB of o. Rows beyond a partial chunk's tokens are zeroed in
// shared memory before any product reads them, and never written.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "ptx.cuh"

#ifndef EMIT_O
#define EMIT_O 1
#endif
#ifndef HAS_V
#define HAS_V 1
#endif
constexpr int C = 64, K = 128;
constexpr int STAGES = 3, SCALAR_STAGES = 4;
constexpr int TILE = C * K * 2, SQUARE = C * C * 2, HALF = TILE / 2;
constexpr int AUX_REGISTERS = 88, STATE_REGISTERS = 208;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float GATE_FLOOR = -104.f;  // exp of it is 0 in fp32

struct Item { int first_chunk, chunks, head, segment; };

struct WalkParams {
    TensorMap k, q, v, o_map; // [tokens, heads, 128] bf16, boxes of 64 channels x 1 head x 64 tokens
    const char* n;            // [HV, T, 64] fp16, swizzled per chunk
    const char* qk;           // [H, T, 64] fp16, likewise: Q K^T of each chunk
    const float* g;           // [T, HV], raw log gates
    const float* beta;        // [T, HV]
    const int2* chunks;       // first row, count
    const Item* items;
    const float* start;       // [segments, HV, K, 128] or null (zero)
    float* end;               // [segments, HV, K, 128]
    __nv_bfloat16* o;         // [T, HV, 128]
    float scale;
    int tokens, value_heads, group;
};

struct Scalars { float gam[C], e[C], beta[C]; int2 chunk; };

struct alignas(1024) WalkSmem {
    char k[STAGES][TILE], q[STAGES][TILE], v[STAGES][TILE];
    char t[STAGES][SQUARE], p[STAGES][SQUARE];  // N and Q K^T as they come, T and P once warpgroup 0 is done
    char o[2][HALF];
    Scalars scalars[SCALAR_STAGES];
    float scan[2][C];
    u64 loaded[STAGES], free[STAGES], ready[STAGES];
};

// ---- warpgroup 0: copies --------------------------------------------------------------------------------------------
__device__ __forceinline__ void load_chunk(const WalkParams& p, WalkSmem& sm, const Item& item, int c, int2 chunk) {
    const int s = c % STAGES, head = item.head / p.group;
    barrier_wait(&sm.free[s], (c / STAGES & 1) ^ 1);
    barrier_expect(&sm.loaded[s], TILE + EMIT_O * TILE + HAS_V * TILE + (1 + EMIT_O) * chunk.y * 128);
    for (int half = 0; half < 2; half++) {
        tma_load(sm.k[s] + half * HALF, &p.k, &sm.loaded[s], half * 64, head, chunk.x);
        if (EMIT_O) tma_load(sm.q[s] + half * HALF, &p.q, &sm.loaded[s], half * 64, head, chunk.x);
        if (HAS_V) tma_load(sm.v[s] + half * HALF, &p.v, &sm.loaded[s], half * 64, item.head, chunk.x);
    }
    bulk_load(sm.t[s], p.n + (static_cast<long long>(item.head) * p.tokens + chunk.x) * 128, chunk.y * 128, &sm.loaded[s]);
    if (EMIT_O) bulk_load(sm.p[s], p.qk + (static_cast<long long>(head) * p.tokens + chunk.x) * 128, chunk.y * 128, &sm.loaded[s]);
}

// A neighbour's rows (or its NaN) must not reach a product: rows count..63 of k, q and v become zero.
__device__ __forceinline__ void zero_tail(WalkSmem& sm, int s, int count, int t) {
    for (int i = t; i < (C - count) * 8; i += 128) {
        int offset = count * 128 + i * 16;
        for (int half = 0; half < 2; half++) {
            *reinterpret_cast<uint4*>(sm.k[s] + half * HALF + offset) = make_uint4(0, 0, 0, 0);
            if (EMIT_O) *reinterpret_cast<uint4*>(sm.q[s] + half * HALF + offset) = make_uint4(0, 0, 0, 0);
            if (HAS_V) *reinterpret_cast<uint4*>(sm.v[s] + half * HALF + offset) = make_uint4(0, 0, 0, 0);
        }
    }
    fence_async();
}

// ---- warpgroup 0: scalars, T and P ----------------------------------------------------------------------------------
struct Gates { float g, beta; };  // of token t < 64 of a chunk; fetched a chunk ahead and not touched until it is needed

__device__ __forceinline__ Gates fetch_gates(const WalkParams& p, int head, int2 chunk, int t) {
    Gates x{0.f, 0.f};
    if (t < chunk.y) {  // at most 64
        long long at = static_cast<long long>(chunk.x + t) * p.value_heads + head;
        x.g = p.g[at], x.beta = p.beta[at];
    }
    return x;
}

__device__ __forceinline__ void gate_scan(WalkSmem& sm, const Gates& x, int2 chunk, int c, int t) {
    Scalars& out = sm.scalars[c % SCALAR_STAGES];
    float* scan = sm.scan[c % 2];
    float g = fmaxf(x.g, GATE_FLOOR) * LOG2_E;  // decays are powers of two from here on
    if (t < C) {
        for (int d = 1; d < 32; d *= 2) {
            float other = __shfl_up_sync(~0u, g, d);
            if (t % 32 >= d) g += other;
        }
        out.beta[t] = x.beta;
        if (t == 0) out.chunk = chunk;
        if (t < 32) scan[t] = g;
    }
    named_barrier<1, 128>();
    if (t >= 32 && t < C) scan[t] = g + scan[31];
    named_barrier<1, 128>();
    if (t < C) {
        out.gam[t] = exp2_approx(scan[t]);
        out.e[t] = exp2_approx(scan[C - 1] - scan[t]);
    }
}

__device__ __forceinline__ void score_tiles(const WalkParams& p, WalkSmem& sm, int2 chunk, int c, int t) {
    const int s = c % STAGES, lane = t % 32, warp = t / 32;
    const float* scan = sm.scan[c % 2];
    const float* beta = sm.scalars[c % SCALAR_STAGES].beta;
    // All loads come before all stores: the compiler cannot see that they do not overlap.
    const int row = warp * 16 + lane / 4, column = lane % 4 * 2;
    u32 tile[16], score[16];
    float row_scan[2] = {scan[row], scan[row + 8]}, row_beta[2] = {beta[row], beta[row + 8]};
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 column_scan = *reinterpret_cast<const float2*>(scan + n * 8 + column);
        const float2 column_beta = *reinterpret_cast<const float2*>(beta + n * 8 + column);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = row + i * 8, m = n * 8 + column;
            const float2 stored = __half22float2(*reinterpret_cast<const __half2*>(sm.t[s] + swizzled(r, m * 2)));
            const bool below0 = m < r && r < chunk.y, below1 = m + 1 < r && r < chunk.y;
            const float decay0 = exp2_approx(row_scan[i] - column_scan.x), decay1 = exp2_approx(row_scan[i] - column_scan.y);
            const float write = -row_beta[i];
            float t0 = below0 ? stored.x * decay0 * column_beta.x * write : 0.f, t1 = below1 ? stored.y * decay1 * column_beta.y * write : 0.f;
            if (m == r) t0 = row_beta[i];
            if (m + 1 == r) t1 = row_beta[i];
            tile[n * 2 + i] = pack(t0, t1);
            if (EMIT_O) {
                const float2 qk = __half22float2(*reinterpret_cast<const __half2*>(sm.p[s] + swizzled(r, m * 2)));
                const float p0 = below0 || (m == r && r < chunk.y) ? qk.x * decay0 * p.scale : 0.f;
                const float p1 = below1 || (m + 1 == r && r < chunk.y) ? qk.y * decay1 * p.scale : 0.f;
                score[n * 2 + i] = pack(p0, p1);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 at = swizzled(row + i * 8, (n * 8 + column) * 2);
            *reinterpret_cast<u32*>(sm.t[s] + at) = tile[n * 2 + i];
            if (EMIT_O) *reinterpret_cast<u32*>(sm.p[s] + at) = score[n * 2 + i];
        }
}

__device__ __forceinline__ void auxiliary(const WalkParams& p, WalkSmem& sm, const Item& item, int t) {
    // Rows of chunks c, c + 1, c + 2 and gates of c + 1 are under way before they are needed: nothing here waits for global memory.
    const int2* table = p.chunks + item.first_chunk;
    const int last = item.chunks - 1;
    int2 chunk = table[0], second = table[min(1, last)], third = table[min(2, last)];
    if (t == 0) {
        load_chunk(p, sm, item, 0, chunk);
        if (last >= 1) load_chunk(p, sm, item, 1, second);
    }
    Gates next = fetch_gates(p, item.head, chunk, t);
    for (int c = 0; c <= last; c++) {
        Gates x = next;
        next = fetch_gates(p, item.head, second, t);
        int2 fourth = table[min(c + 3, last)];
        gate_scan(sm, x, chunk, c, t);
        barrier_wait(&sm.loaded[c % STAGES], c / STAGES & 1);
        if (chunk.y < C) {
            zero_tail(sm, c % STAGES, chunk.y, t);
            named_barrier<1, 128>();
        }
        score_tiles(p, sm, chunk, c, t);
        fence_async();
        barrier_arrive(&sm.ready[c % STAGES]);
        if (t == 0 && c + 2 <= last) load_chunk(p, sm, item, c + 2, third);  // waits for chunk c - 1, which runs beside this one
        chunk = second, second = third, third = fourth;
    }
}

// ---- warpgroups 1 and 2: the state ----------------------------------------------------------------------------------
__device__ __forceinline__ void half_barrier(int half) {
    if (half == 0) named_barrier<2, 128>(); else named_barrier<3, 128>();
}

// Element i of a fragment row pair: state column (of v) and state row (of k) that register S[i] holds.
__device__ __forceinline__ int state_offset(int i, int half, int warp, int lane) {
    int column = half * 64 + warp * 16 + lane / 4 + (i >> 1 & 1) * 8, row = i / 4 * 8 + lane % 4 * 2 + (i & 1);
    return row * K + column;
}

// O^T of one half to global memory: a whole chunk by one bulk copy that runs beside the next chunk, a partial one row by row.
__device__ __forceinline__ void store_output(const WalkParams& p, WalkSmem& sm, const float (&O)[32], const Item& item, int2 chunk, int half, int t) {
    const int lane = t % 32, warp = t / 32;
    char* tile = sm.o[half];
    if (t == 0) bulk_wait_read<0>();
    half_barrier(half);  // the tile's last reader is done
#pragma unroll
    for (int n = 0; n < 4; n++) {
        u32 at = smem_addr(tile) + swizzled(n * 16 + lane / 16 * 8 + lane % 8, (warp * 16 + lane / 8 % 2 * 8) * 2);
        stmatrix_trans(at, pack(O[n * 8], O[n * 8 + 1]), pack(O[n * 8 + 2], O[n * 8 + 3]), pack(O[n * 8 + 4], O[n * 8 + 5]), pack(O[n * 8 + 6], O[n * 8 + 7]));
    }
    fence_async();
    half_barrier(half);
    if (chunk.y == C) {
        if (t == 0) tma_store(&p.o_map, tile, half * 64, item.head, chunk.x);
        return;
    }
    for (int i = t; i < chunk.y * 8; i += 128) {
        int row = i / 8, unit = i % 8;
        __nv_bfloat16* out = p.o + (static_cast<long long>(chunk.x + row) * p.value_heads + item.head) * K + half * 64 + unit * 8;
        *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(tile + swizzled(row, unit * 16));
    }
}

__device__ __forceinline__ void state_chunk(const WalkParams& p, WalkSmem& sm, float (&S)[64], const Item& item, int c, int half, int t) {
    const int s = c % STAGES, lane = t % 32, warp = t / 32;
    const Scalars& scalar = sm.scalars[c % SCALAR_STAGES];
    const u32 k = smem_addr(sm.k[s]), q = smem_addr(sm.q[s]), tt = smem_addr(sm.t[s]), pp = smem_addr(sm.p[s]);
    u32 state[32];
#pragma unroll
    for (int i = 0; i < 32; i++) state[i] = pack(S[2 * i], S[2 * i + 1]);
    barrier_wait(&sm.ready[s], c / STAGES & 1);

    // U = S^T K^T and O = S^T Q^T.
    float U[32], O[32];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; i++) wgmma_rs64(U, state + i * 4, descriptor(k + i / 4 * HALF + i % 4 * 32, 1, 64), i > 0);
    wgmma_commit();
    if (EMIT_O) {
#pragma unroll
        for (int i = 0; i < 8; i++) wgmma_rs64(O, state + i * 4, descriptor(q + i / 4 * HALF + i % 4 * 32, 1, 64), i > 0);
        wgmma_commit();
    }

    // W^T = V^T - U diag(gam), as the next operand.
    u32 values[16] = {}, w[16];
    if (HAS_V) {
#pragma unroll
        for (int n = 0; n < 4; n++)
            ldmatrix_trans(smem_addr(sm.v[s]) + half * HALF + swizzled(n * 16 + lane / 16 * 8 + lane % 8, (warp * 16 + lane / 8 % 2 * 8) * 2), values + n * 4);
    }
    if (EMIT_O) wgmma_wait<1>(); else wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float2 gam = *reinterpret_cast<const float2*>(&scalar.gam[n * 8 + lane % 4 * 2]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 v = values[n * 2 + i];
            w[n * 2 + i] = pack(low_half(v) - gam.x * U[n * 4 + i * 2], high_half(v) - gam.y * U[n * 4 + i * 2 + 1]);
        }
    }

    // X = W^T T^T = Vn^T, while the state decays.
    float X[32];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_rs64(X, w + i * 4, descriptor(tt + i * 32, 1, 64), i > 0);
    wgmma_commit();
    float decay = scalar.gam[C - 1];
#pragma unroll
    for (int i = 0; i < 64; i++) S[i] *= decay;
    wgmma_wait<0>();
    u32 plain[16], scaled[16];
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float2 e = *reinterpret_cast<const float2*>(&scalar.e[n * 8 + lane % 4 * 2]);
        scaled[n * 2] = pack(X[n * 4] * e.x, X[n * 4 + 1] * e.y);
        scaled[n * 2 + 1] = pack(X[n * 4 + 2] * e.x, X[n * 4 + 3] * e.y);
        if (EMIT_O) {
            float2 gam = *reinterpret_cast<const float2*>(&scalar.gam[n * 8 + lane % 4 * 2]);
            plain[n * 2] = pack(X[n * 4], X[n * 4 + 1]);
            plain[n * 2 + 1] = pack(X[n * 4 + 2], X[n * 4 + 3]);
            O[n * 4] *= gam.x * p.scale, O[n * 4 + 1] *= gam.y * p.scale;
            O[n * 4 + 2] *= gam.x * p.scale, O[n * 4 + 3] *= gam.y * p.scale;
        }
    }

    // S^T += (e Vn)^T K, O^T += Vn^T P^T.
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_rs128_mn(S, scaled + i * 4, descriptor(k + i * 2048, HALF / 16, 64));
    wgmma_commit();
    if (EMIT_O) {
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_rs64(O, plain + i * 4, descriptor(pp + i * 32, 1, 64), 1);
        wgmma_commit();
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(&sm.free[s]);  // every warp: a product is done warp by warp
    if (EMIT_O) store_output(p, sm, O, item, scalar.chunk, half, t);
}

extern "C" __global__ void __launch_bounds__(384, 1) walk(const __grid_constant__ WalkParams p) {
    extern __shared__ __align__(1024) char raw[];
    WalkSmem& sm = *reinterpret_cast<WalkSmem*>(raw);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), t = threadIdx.x % 128;
    const Item item = p.items[blockIdx.x];
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(&sm.loaded[i], 1), barrier_init(&sm.free[i], 8), barrier_init(&sm.ready[i], 128);
        fence_barrier_init();
    }
    __syncthreads();
    if (warpgroup == 0) {
        registers_dec<AUX_REGISTERS>();
        auxiliary(p, sm, item, t);
    } else {
        registers_inc<STATE_REGISTERS>();
        const int half = warpgroup - 1;
        const long long at = (static_cast<long long>(item.segment) * p.value_heads + item.head) * K * K;
        float S[64];
#pragma unroll
        for (int i = 0; i < 64; i++) S[i] = p.start ? p.start[at + state_offset(i, half, t / 32, t % 32)] : 0.f;
        for (int c = 0; c < item.chunks; c++) state_chunk(p, sm, S, item, c, half, t);
        if (EMIT_O) bulk_wait<0>();
#pragma unroll
        for (int i = 0; i < 64; i++) p.end[at + state_offset(i, half, t / 32, t % 32)] = S[i];
    }
}
