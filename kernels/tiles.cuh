// What the three walks share: their parameters, the first warpgroup (copies, scalars, T and P) and the state's way in and out.
//
// A walk runs the chunks of one segment and value head one after the other (of short ones a run), 384 threads as 3 warpgroups:
//   0    warp 0 copies ahead; warps 1 to 3 make the scalars and turn Q K^T into P = s (Q K^T) o D where it lies
//   1, 2 a state, transposed, in registers: 64 of the 128 value columns each, fp32; bf16 as product operand
// Rows beyond a partial chunk's tokens are zeroed in shared memory before any product reads them, and never written.
// The file that includes this says: HAS_Q (q and Q K^T are read), SUMMARY (only end states are wanted), REVERSE.
#pragma once
#include <cuda_fp16.h>
#include "chunk.cuh"
#include "decay.cuh"

constexpr int STAGES = 3;  // of tiles and scalars
constexpr int STRIP = SQUARE / 4;  // 16 rows of T
constexpr int AUX_REGISTERS = 88, STATE_REGISTERS = 208;
static_assert(AUX_REGISTERS + 2 * STATE_REGISTERS == 504, "more than the launch has: a warpgroup would wait for registers for ever");

// Chunks of one segment, or of `run` segments from `segment` on; of a summary's: `run` < 0 asks for the map in place of the offset.
struct Item { int first_chunk, chunks; short head, run; int segment; };

struct WalkParams {
    TensorMap k, q, v, out_map;  // [tokens, heads, 128] bf16, boxes of 64 channels x 1 head x 64 tokens; see `out`
    TensorMap t[C / 16];         // of strips of T, see `prepare`: boxes of 64 channels x 16 rows
    const char* qk;              // [H, T, 64] fp16, swizzled per chunk: Q K^T, zero above the diagonal
    const float* g;              // [T, HV], raw log gates
    const float* rstd;           // [2, H, T]: 1 / norm of q and of k where the kernel normalizes, else null
    const int2* chunks;          // first row, count
    const int4* ranks;           // the number of each strip of T among those of its kind
    __nv_bfloat16* out;          // [T, HV, 128]: o, or dv in the adjoint walk
    float scale;
    int tokens, value_heads, group, out_row;  // from token to token of `out`, in elements
    const Item* items;
    const int2* rows;            // per segment: row of its start state in `start` and of its end state in `end`, -1: none
    const int4* segments;        // first chunk, chunks, row of its map in `maps`, ..
    const float* start;          // [.., HV, K, 128]
    float* end;                  // [.., HV, K, 128]
    const int2* places;          // per item: place of its first chunk in `states` and `values`, and from chunk to chunk
    char* states;                // [places, 2, K, 64] bf16, swizzled: the state before each chunk (in the walk's direction)
    char* values;                // [places, 2, C, 64] bf16, swizzled: Vn
    const float* bound;          // [HV, num_chunks], log bound of every chunk; null: decay hides nothing
    float* maps;                 // [.., HV, K, 128]
    int* dropped;                // [maps, HV], filled: 1 where the map is zero, else 0; adjoints may have none
    float cutoff;
    int num_chunks;
};

// Per token: what scales a read by k and q and a write by k; norms of raw q and k included.
struct Scalars { float read_k[C], read_q[C], write_k[C]; int2 chunk; float decay, unused; };

struct Tiles {
    char k[STAGES][TILE];
#if HAS_Q
    char q[STAGES][TILE];
#endif
    char v[STAGES][TILE];
    char t[STAGES][SQUARE];
#if HAS_Q
    char p[STAGES][SQUARE];  // Q K^T as it comes, P once warpgroup 0 is done
#endif
};
struct Signals {
    Scalars scalars[STAGES];
    float scan[C];  // of the chunk that warpgroup 0 is at
    u64 loaded[STAGES], free[STAGES], ready[STAGES];
};

__device__ __forceinline__ bool is_map(const Item& item) { return SUMMARY && item.run < 0; }
__device__ __forceinline__ bool has_v(const Item& item) { return !is_map(item); }  // v, or dO
__device__ __forceinline__ int place(const Item& item, int c) { return REVERSE ? item.first_chunk + item.chunks - 1 - c : item.first_chunk + c; }

// ---- warpgroup 0, warp 0: copies -------------------------------------------------------------------------------------
__device__ __forceinline__ void load_chunk(const WalkParams& p, Tiles& sm, Signals& signals, const Item& item, int c, int2 chunk, int4 ranks) {
    const int s = c % STAGES, head = item.head / p.group, strips = (chunk.y + 15) / 16;
    const int rank[C / 16] = {ranks.x, ranks.y, ranks.z, ranks.w};
    u64* bar = &signals.loaded[s];
    barrier_wait(&signals.free[s], (c / STAGES & 1) ^ 1);
    barrier_expect(bar, TILE + strips * STRIP + has_v(item) * TILE + HAS_Q * (TILE + chunk.y * 128));
    for (int half = 0; half < 2; half++) {
        tma_load(sm.k[s] + half * HALF, &p.k, bar, half * 64, head, chunk.x);
#if HAS_Q
        tma_load(sm.q[s] + half * HALF, &p.q, bar, half * 64, head, chunk.x);
#endif
        if (has_v(item)) tma_load(sm.v[s] + half * HALF, &p.v, bar, half * 64, item.head, chunk.x);
    }
#pragma unroll
    for (int i = 0; i < C / 16; i++)
        if (i < strips) strip_load(sm.t[s] + i * STRIP, &p.t[i], bar, (rank[i] * p.value_heads + item.head) * 16);
#if HAS_Q
    bulk_load(sm.p[s], p.qk + (static_cast<long long>(head) * p.tokens + chunk.x) * 128, chunk.y * 128, bar);
#endif
}

__device__ __forceinline__ void copies(const WalkParams& p, Tiles& sm, Signals& signals, const Item& item) {
    int2 next = p.chunks[place(item, 0)];
    int4 next_ranks = p.ranks[place(item, 0)];
    for (int c = 0; c < item.chunks; c++) {
        const int2 chunk = next;
        const int4 ranks = next_ranks;
        const int following = place(item, min(c + 1, item.chunks - 1));
        next = p.chunks[following], next_ranks = p.ranks[following];
        load_chunk(p, sm, signals, item, c, chunk, ranks);
    }
}

// ---- warpgroup 0, warps 1 to 3: scalars and P -----------------------------------------------------------------------
constexpr int SCORERS = 96;  // threads

// A neighbour's rows (or its NaN) must not reach a product: rows count..63 of a tile become zero.
__device__ __forceinline__ void zero_rows(char* tile, int halves, int count, int t) {
    for (int i = t; i < (C - count) * 8 * halves; i += SCORERS)
        *reinterpret_cast<uint4*>(tile + i % halves * HALF + count * 128 + i / halves * 16) = make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void zero_tail(Tiles& sm, int s, int count, int t) {
    zero_rows(sm.t[s], 1, count, t), zero_rows(sm.k[s], 2, count, t);
#if HAS_Q
    zero_rows(sm.p[s], 1, count, t), zero_rows(sm.q[s], 2, count, t);
#endif
    zero_rows(sm.v[s], 2, count, t);
    fence_async();
    named_barrier<1, SCORERS>();
}

struct Gates { float g, q_norm, k_norm; };  // of token t < 64 of a chunk; fetched a chunk ahead, untouched until needed

__device__ __forceinline__ Gates fetch_gates(const WalkParams& p, int head, int2 chunk, int t) {
    asm volatile("" : "+r"(head));  // addresses are worked out here, not kept in registers from chunk to chunk
    Gates x{0.f, 1.f, 1.f};
    if (t < chunk.y) {  // at most 64
        const long long row = chunk.x + t;
        x.g = p.g[row * p.value_heads + head];
        if (p.rstd) {
            const long long heads = p.value_heads / p.group, qk_head = head / p.group;
            if (HAS_Q) x.q_norm = p.rstd[qk_head * p.tokens + row];
            x.k_norm = p.rstd[(heads + qk_head) * p.tokens + row];
        }
    }
    return x;
}

__device__ __forceinline__ void gate_scan(const WalkParams& p, Signals& sm, const Gates& x, int2 chunk, int s, int t) {
    asm volatile("" : "+r"(t));  // as in fetch_gates
    Scalars& out = sm.scalars[s];
    float g = fmaxf(x.g, GATE_FLOOR) * LOG2_E;  // decays are powers of two from here on
    if (t < C)
        for (int d = 1; d < 32; d *= 2) {
            float other = __shfl_up_sync(~0u, g, d);
            if (t % 32 >= d) g += other;
        }
    named_barrier<1, SCORERS>();  // the scores of the chunk before no longer need the scan
    if (t < 32) sm.scan[t] = g;
    named_barrier<1, SCORERS>();
    if (t >= 32 && t < C) sm.scan[t] = g += sm.scan[31];
    named_barrier<1, SCORERS>();
    if (t < C) {
        const float last = sm.scan[C - 1], gam = exp2_approx(g);
        out.read_k[t] = gam * x.k_norm;
        out.write_k[t] = exp2_approx(last - g) * x.k_norm;
        out.read_q[t] = gam * x.q_norm * p.scale;
        if (t == 0) out.chunk = chunk, out.decay = exp2_approx(last);
    }
}

// Q K^T -> P = s (Q K^T) o D in place, the ten 16 x 16 blocks on and below the diagonal; above it `prepare` left zeros. All loads
// come before all stores: the compiler cannot see that they do not overlap.
__device__ __forceinline__ void score_tile(const WalkParams& p, char* tile, const float* scan, int t) {
    const int lane = t % 32, warp = t / 32;
    u32 score[16];
    u32 at[4];
#pragma unroll
    for (int b = 0; b < 4; b++) {
        const int block = b * 3 + warp, row_block = (block >= 1) + (block >= 3) + (block >= 6), column_block = block - row_block * (row_block + 1) / 2;
        const int row = row_block * 16 + lane / 4, column = column_block * 16 + lane % 4 * 2;
        at[b] = smem_addr(tile) + swizzled(row, column * 2);
        if (block > 9) break;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = row + i % 2 * 8, m = column + i / 2 * 8;
            const float row_scan = scan[r];
            const float2 column_scan = *reinterpret_cast<const float2*>(scan + m);
            const u32 loaded = load_shared((at[b] ^ (i / 2 * 16)) + i % 2 * 1024);
            const float2 qk = __half22float2(*reinterpret_cast<const __half2*>(&loaded));
            const float p0 = m <= r ? qk.x * exp2_approx(row_scan - column_scan.x) * p.scale : 0.f;
            const float p1 = m < r ? qk.y * exp2_approx(row_scan - column_scan.y) * p.scale : 0.f;
            score[b * 4 + i] = pack(p0, p1);
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (i / 4 * 3 + warp <= 9) store_shared((at[i / 4] ^ (i / 2 % 2 * 16)) + i % 2 * 1024, score[i]);
}

__device__ __forceinline__ void scalars(const WalkParams& p, Tiles& sm, Signals& signals, const Item& item, int t) {
    // Rows and gates of the next chunk are under way before they are needed: nothing here waits for global memory.
    auto rows_of = [&](int c) { return p.chunks[place(item, min(c, item.chunks - 1))]; };
    int2 chunk = rows_of(0), second = rows_of(1);
    Gates gates = fetch_gates(p, item.head, chunk, t);
    for (int c = 0; c < item.chunks; c++) {
        const int s = c % STAGES;
        const Gates now = gates;
        gates = fetch_gates(p, item.head, second, t);
        const int2 third = rows_of(c + 2);
        barrier_wait(&signals.loaded[s], c / STAGES & 1);  // the stage's last chunk is done with its scalars, too
        gate_scan(p, signals, now, chunk, s, t);
        if (chunk.y < C) zero_tail(sm, s, chunk.y, t);
#if HAS_Q
        score_tile(p, sm.p[s], signals.scan, t);
        fence_async();
#endif
        barrier_arrive(&signals.ready[s]);
        chunk = second, second = third;
    }
}

__device__ __forceinline__ void auxiliary(const WalkParams& p, Tiles& sm, Signals& signals, const Item& item, int t) {
    if (t == 0) copies(p, sm, signals, item);
    if (t >= 32) scalars(p, sm, signals, item, t - 32);
}

// ---- warpgroups 1 and 2: the state's way in and out -----------------------------------------------------------------
// Fragments of a transposed [128 x n] matrix: rows are value columns half * 64 + warp * 16 + lane / 4 (+ 8), pairs run along n.
__device__ __forceinline__ int state_offset(int i, int half, int warp, int lane) {
    return (i / 4 * 8 + lane % 4 * 2 + (i & 1)) * K + half * 64 + warp * 16 + lane / 4 + (i >> 1 & 1) * 8;
}

__device__ __forceinline__ void start_state(const WalkParams& p, float (&S)[64], const Item& item, int row, int half, int t) {
    asm volatile("" : "+r"(t));  // offsets are worked out here, not kept in registers through the walk
    const float* from = p.start + (static_cast<long long>(row) * p.value_heads + item.head) * K * K;
    const float one = is_map(item) && item.chunks > 0 ? 1.f : 0.f;  // a map starts as the identity
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const int at = state_offset(i, half, t / 32, t % 32);
        S[i] = row >= 0 ? from[at] : at / K == at % K ? one : 0.f;
    }
}
__device__ __forceinline__ void end_state(float* end, const WalkParams& p, const float (&S)[64], const Item& item, int row, int half, int t) {
    if (row < 0) return;
    asm volatile("" : "+r"(t));  // as in start_state
    float* to = end + (static_cast<long long>(row) * p.value_heads + item.head) * K * K;
#pragma unroll
    for (int i = 0; i < 64; i++) to[state_offset(i, half, t / 32, t % 32)] = S[i];
}

// Where a thread's row of 8 x 8 matrices lies when fragments go to (or come from) a tile of [n][64 value columns].
__device__ __forceinline__ u32 transposed_at(const char* tile, int n, int t) {
    const int lane = t % 32;
    return smem_addr(tile) + swizzled(n * 16 + lane / 16 * 8 + lane % 8, (t / 32 * 16 + lane / 8 % 2 * 8) * 2);
}
// A chunk's [64 x 64] input tile as the A operand of a transposed product.
__device__ __forceinline__ void load_transposed(u32 (&a)[16], const char* tile, int t) {
#pragma unroll
    for (int n = 0; n < 4; n++) ldmatrix_trans(transposed_at(tile, n, t), a + n * 4);
}
template <int N> __device__ __forceinline__ void store_transposed(char* tile, const u32* a, int t) {  // N / 16 groups of four fragments
#pragma unroll
    for (int n = 0; n < N / 16; n++) stmatrix_trans(transposed_at(tile, n, t), a[n * 4], a[n * 4 + 1], a[n * 4 + 2], a[n * 4 + 3]);
}
__device__ __forceinline__ void pack_all(u32 (&to)[16], const float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < 16; i++) to[i] = pack(x[2 * i], x[2 * i + 1]);
}

// Where the c-th chunk's state and Vn go.
__device__ __forceinline__ long long place_of(const WalkParams& p, const Item& item, int c) {
    const int2 at = p.places[blockIdx.x];
    return at.x + static_cast<long long>(REVERSE ? item.chunks - 1 - c : c) * at.y;
}
// The state before a chunk to global memory; its image in shared memory must be free.
__device__ __forceinline__ void emit_state(const WalkParams& p, char* image, const u32 (&state)[32], const Item& item, int c, int half, int t) {
    store_transposed<K>(image, state, t);
    fence_async();
    half_barrier(half);
    if (t == 0) bulk_store(p.states + (place_of(p, item, c) * 2 + half) * (IMAGE / 2), image, IMAGE / 2);
}

// One half of [tokens, 128] outputs from a tile in shared memory: a whole chunk by one bulk copy, a partial one row by row.
__device__ __forceinline__ void emit_rows(const WalkParams& p, char* tile, const Item& item, int2 chunk, int half, int t) {
    fence_async();
    half_barrier(half);
    if (chunk.y == C) {
        if (t == 0) tma_store(&p.out_map, tile, half * 64, item.head, chunk.x);
        return;
    }
    for (int i = t; i < chunk.y * 8; i += 128) {
        const int row = i / 8, unit = i % 8;
        __nv_bfloat16* out = p.out + static_cast<long long>(chunk.x + row) * p.out_row + item.head * K + half * 64 + unit * 8;
        *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(tile + swizzled(row, unit * 16));
    }
    half_barrier(half);
}

__device__ __forceinline__ void init_signals(Signals& sm) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(&sm.loaded[i], 1), barrier_init(&sm.free[i], 8), barrier_init(&sm.ready[i], SCORERS);
        fence_barrier_init();
    }
    __syncthreads();
}
// The item of this block without the chunks that decay hides; returns how many were left out.
__device__ __forceinline__ int trim(const WalkParams& p, Item& item) {
    if (!SUMMARY || !p.bound) return 0;
    float total;
    const float* bound = p.bound + static_cast<long long>(item.head) * p.num_chunks + item.first_chunk;
    int hidden = skipped(bound, item.chunks, p.cutoff, REVERSE, threadIdx.x % 32, total);
    const int map = p.segments[item.segment].z;
    if (is_map(item) || (REVERSE && p.dropped && map >= 0)) {  // the adjoint has the maps, and says again which of them are zero
        if (REVERSE) skipped(bound, item.chunks, p.cutoff, false, threadIdx.x % 32, total);  // the bits of the forward's sum
        const bool zero = !(total > p.cutoff);
        if (!REVERSE) hidden = zero ? item.chunks : 0;
        if (threadIdx.x == 0) p.dropped[static_cast<long long>(map) * p.value_heads + item.head] = zero;
    }
    if (!REVERSE) item.first_chunk += hidden;
    item.chunks -= hidden;
    return hidden;
}

// One segment's offset or map.
template <typename Smem, typename Chunk> __device__ __forceinline__ void run_summary(const WalkParams& p, Smem& sm, const Item& item, int hidden, int half, int t, Chunk chunk) {
    float state[64];
    start_state(p, state, item, hidden || is_map(item) || !p.start ? -1 : p.rows[item.segment].x, half, t);
    for (int c = 0; c < item.chunks; c++) chunk(sm, state, item, c, false, half, t);
    if (is_map(item)) end_state(p.maps, p, state, item, p.segments[item.segment].z, half, t);
    else end_state(p.end, p, state, item, p.rows[item.segment].y, half, t);
}
// A run, segment by segment; the chunks leave copies under way, but of a state that is zero.
template <typename Smem, typename Chunk> __device__ __forceinline__ void run_segments(const WalkParams& p, Smem& sm, const Item& item, int half, int t, Chunk chunk) {
    float state[64];
    int c = 0;
    for (int i = 0; c < item.chunks; i++) {
        const int segment = p.items[blockIdx.x].segment + (REVERSE ? item.run - 1 - i : i);  // read again, not kept in a register
        const int row = p.start ? p.rows[segment].x : -1, first = c;
        start_state(p, state, item, row, half, t);
        for (const int last = c + p.segments[segment].y; c < last; c++) chunk(sm, state, item, c, row < 0 && c == first, half, t);
        end_state(p.end, p, state, item, p.rows[segment].y, half, t);
    }
    bulk_wait<0>();
}

// A block's work, `chunk` by chunk.
template <typename Smem, typename Chunk> __device__ __forceinline__ void run_item(const WalkParams& p, Chunk chunk) {
    extern __shared__ __align__(1024) char raw[];
    Smem& sm = *reinterpret_cast<Smem*>(raw);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), t = threadIdx.x % 128;
    Item item = p.items[blockIdx.x];
    const int hidden = trim(p, item);
    init_signals(sm.signals);
    if (warpgroup == 0) {
        registers_dec<AUX_REGISTERS>();
        if (item.chunks > 0) auxiliary(p, sm.tiles, sm.signals, item, t);
    } else {
        registers_inc<STATE_REGISTERS>();
        if (SUMMARY) run_summary(p, sm, item, hidden, warpgroup - 1, t, chunk); else run_segments(p, sm, item, warpgroup - 1, t, chunk);
    }
}
