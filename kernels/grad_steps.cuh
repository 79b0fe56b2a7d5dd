// What the warpgroups of `grad` share: parameters, shared memory, the order of the steps, and the helper warps that copy ahead and
// write the gradients of gate and beta.
#pragma once
#include "chunk.cuh"
#include "group.cuh"

constexpr int HELPER_REGISTERS = 56, WORKER_REGISTERS = 152;
constexpr float BETA_FLOOR = 0x1p-40f;  // as in inverse.cuh

enum Zero { NO_STATE = 1, NO_ADJOINT = 2 };  // the state before (the adjoint after) a chunk is zero, and was not written
struct alignas(16) Step { int first_row, count; short head, zero; int chunk; };  // a chunk and a q/k head

struct GradParams {
    TensorMap k, q, dout, dv, dq_map, dk_map;  // [tokens, heads, 128] bf16, boxes of 64 channels x 1 head x 64 tokens
    const char *states, *adjoints;             // [steps, GROUP, 2, K, 64] bf16, swizzled: S before and dS' after each chunk
    const char* values;                        // [steps, GROUP, 2, C, 64] bf16, swizzled: Vn
    const float *g, *beta;                     // [T, HV]
    const float* rstd;                         // [2, H, T]: 1 / norm of q and of k where the kernel normalizes, else null
    const Step* steps;
    __nv_bfloat16 *dq, *dk;                    // [T, H, 128], heads dense
    float *dg, *dbeta;                         // [T, HV]
    float scale;
    int tokens, value_heads, num_steps, row;   // from token to token of dq and of dk, in elements
    int zero;                                  // which flags of the steps hold in this call
};

enum Buffer { QK, DOUT, DV, DS, S0, S1, VN0, VN1, BUFFERS };

struct Scalars { float scan[C], gam[C], e[C], beta[C]; int live[C]; };
struct RowSums { float read[2][C], written[2][C], crossing[4][C], diagonal[C], carried[8]; };  // by warpgroup or warp

struct alignas(1024) GradSmem {
    char q[TILE], k[TILE], dout[TILE], dv[TILE], vn[2][TILE], ds[IMAGE], s[2][IMAGE], pairs[2][SQUARE];
    Scalars scalars[2];
    RowSums sums[2];
    float along[2][2][C];  // y . dy of q and k, by column half
    u64 loaded[BUFFERS], freed[BUFFERS], scalars_ready[2], sums_ready[2], sums_free[2], pairs_ready, pairs_free, met;
};

struct Place { int step, item, head, value_head; int2 chunk; int image, zero; };  // one value head of one step

template <typename Work> __device__ __forceinline__ void each_step(const GradParams& p, Work work) {
    int step = 0, item = 0;
    for (int w = blockIdx.x; w < p.num_steps; w += gridDim.x, item++) {
        const Step at = p.steps[w];
        for (int member = 0; member < GROUP; member++, step++)
            work(Place{step, item, at.head, at.head * GROUP + member, make_int2(at.first_row, at.count), w * GROUP + member, at.zero & p.zero}, member);
    }
}

__device__ __forceinline__ void wait_loaded(GradSmem& sm, int buffer, int uses) { barrier_wait(&sm.loaded[buffer], uses & 1); }
__device__ __forceinline__ void release(GradSmem& sm, int buffer, int t) {  // every warp: a product is done warp by warp
    if (t % 32 == 0) barrier_arrive(&sm.freed[buffer]);
}

// ---- warpgroup 3, warp 0: copies ------------------------------------------------------------------------------------
__device__ __forceinline__ u64* acquire(GradSmem& sm, int buffer, int uses, u32 bytes) {
    barrier_wait(&sm.freed[buffer], (uses & 1) ^ 1);
    barrier_expect(&sm.loaded[buffer], bytes);
    return &sm.loaded[buffer];
}
__device__ __forceinline__ void load_tile(char* tile, const TensorMap* map, u64* bar, int head, int row) {
    for (int half = 0; half < 2; half++) tma_load(tile + half * HALF, map, bar, half * 64, head, row);
}
__device__ __forceinline__ void load_image(GradSmem& sm, char* image, const char* from, int buffer, int uses, bool there) {
    u64* bar = acquire(sm, buffer, uses, there * IMAGE);
    if (there) bulk_load(image, from, IMAGE, bar);
}
__device__ __forceinline__ void copies(const GradParams& p, GradSmem& sm) {
    each_step(p, [&](const Place& at, int member) {
        const int s = at.step & 1, bytes = at.chunk.y * 128;
        const long long image = static_cast<long long>(at.image) * IMAGE;
        load_image(sm, sm.s[s], p.states + image, S0 + s, at.step / 2, !(at.zero & NO_STATE));
        u64* values = acquire(sm, VN0 + s, at.step / 2, 2 * bytes);
        for (int half = 0; half < 2; half++)
            bulk_load(sm.vn[s] + half * HALF, p.values + image / 2 + half * HALF, bytes, values);
        load_tile(sm.dout, &p.dout, acquire(sm, DOUT, at.step, TILE), at.value_head, at.chunk.x);
        load_tile(sm.dv, &p.dv, acquire(sm, DV, at.step, TILE), at.value_head, at.chunk.x);
        load_image(sm, sm.ds, p.adjoints + image, DS, at.step, !(at.zero & NO_ADJOINT));
        if (member == 0) {
            u64* bar = acquire(sm, QK, at.item, 2 * TILE);
            load_tile(sm.q, &p.q, bar, at.head, at.chunk.x);
            load_tile(sm.k, &p.k, bar, at.head, at.chunk.x);
        }
    });
}

// ---- warpgroup 3, warp 1: scalars, gradients of gate and beta -------------------------------------------------------
// Lane l has tokens 2 l and 2 l + 1.
__device__ __forceinline__ float sum_below(float x, int lane) {  // over lower lanes
    for (int d = 1; d < 32; d *= 2) {
        const float other = __shfl_up_sync(~0u, x, d);
        if (lane >= d) x += other;
    }
    x = __shfl_up_sync(~0u, x, 1);
    return lane ? x : 0.f;
}
__device__ __forceinline__ float sum_above(float x, int lane) {  // over higher lanes
    for (int d = 1; d < 32; d *= 2) {
        const float other = __shfl_down_sync(~0u, x, d);
        if (lane + d < 32) x += other;
    }
    x = __shfl_down_sync(~0u, x, 1);
    return lane < 31 ? x : 0.f;
}

__device__ __forceinline__ void make_scalars(const GradParams& p, GradSmem& sm, const Place& at, int lane) {
    Scalars& out = sm.scalars[at.step & 1];
    float g[2] = {0.f, 0.f}, beta[2] = {0.f, 0.f};
    for (int i = 0; i < 2; i++)
        if (2 * lane + i < at.chunk.y) {
            const long long row = (at.chunk.x + 2ll * lane + i) * p.value_heads + at.value_head;
            g[i] = p.g[row], beta[i] = fmaxf(p.beta[row], BETA_FLOOR);
        }
    const float x = fmaxf(g[0], GATE_FLOOR) * LOG2_E, y = fmaxf(g[1], GATE_FLOOR) * LOG2_E;
    const float first = sum_below(x + y, lane) + x, second = first + y, last = __shfl_sync(~0u, second, 31);
    const float scan[2] = {first, second};
    for (int i = 0; i < 2; i++) {
        const int t = 2 * lane + i;
        out.scan[t] = scan[i], out.gam[t] = exp2_approx(scan[i]), out.e[t] = exp2_approx(last - scan[i]);
        out.beta[t] = beta[i], out.live[t] = g[i] >= GATE_FLOOR;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&sm.scalars_ready[at.step & 1]);
}

__device__ __forceinline__ void write_gate_gradients(const GradParams& p, GradSmem& sm, const Place& at, int lane) {
    const int s = at.step & 1;
    const Scalars& scalar = sm.scalars[s];
    const RowSums& sums = sm.sums[s];
    barrier_wait(&sm.sums_ready[s], at.step / 2 & 1);
    float read[2], written[2], crossing[2], carried = 0.f;
    for (int i = 0; i < 2; i++) {
        const int t = 2 * lane + i;
        read[i] = sums.read[0][t] + sums.read[1][t], written[i] = sums.written[0][t] + sums.written[1][t];
        crossing[i] = (sums.crossing[0][t] + sums.crossing[1][t]) + (sums.crossing[2][t] + sums.crossing[3][t]);
    }
    for (int w = 0; w < 8; w++) carried += sums.carried[w];
    carried *= scalar.gam[C - 1];
    const float later = sum_above(read[0] + read[1], lane), earlier = sum_below(written[0] + written[1], lane);
    const float dg[2] = {crossing[0] + (read[0] + read[1] + later) + earlier + carried, crossing[1] + (read[1] + later) + (earlier + written[0]) + carried};
    for (int i = 0; i < 2; i++) {
        const int t = 2 * lane + i;
        if (t >= at.chunk.y) continue;
        const long long row = (static_cast<long long>(at.chunk.x) + t) * p.value_heads + at.value_head;
        p.dg[row] = scalar.live[t] ? dg[i] : 0.f;
        p.dbeta[row] = sums.diagonal[t] / scalar.beta[t] / scalar.beta[t];
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&sm.sums_free[s]);
}

__device__ __forceinline__ void gates(const GradParams& p, GradSmem& sm, int lane) {
    Place before{};
    each_step(p, [&](const Place& at, int) {
        make_scalars(p, sm, at, lane);  // its slot was last read for the step before `before`, whose sums are written
        if (at.step) write_gate_gradients(p, sm, before, lane);
        before = at;
    });
    if (blockIdx.x < p.num_steps) write_gate_gradients(p, sm, before, lane);
}

// ---- workers --------------------------------------------------------------------------------------------------------
// The three warpgroups of workers wait for each other, `meetings` times so far. They come from two places of the code, for which a
// named barrier has no rule.
__device__ __forceinline__ void meet(GradSmem& sm, int& meetings) {
    barrier_arrive(&sm.met);
    barrier_wait(&sm.met, meetings++ & 1);
}

// Rows beyond a partial chunk's tokens must not reach a product: they hold a neighbour's values or old ones.
__device__ __forceinline__ void zero_rows(char* tile, int count) {
    for (int i = threadIdx.x; i < (C - count) * 16; i += 384)
        *reinterpret_cast<uint4*>(tile + (i & 1) * HALF + count * 128 + (i >> 1) * 16) = make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void clean_partial(GradSmem& sm, const Place& at, int& meetings) {
    const int s = at.step & 1;
    wait_loaded(sm, QK, at.item), wait_loaded(sm, DOUT, at.step), wait_loaded(sm, DV, at.step), wait_loaded(sm, VN0 + s, at.step / 2);
    meet(sm, meetings);
    for (char* tile : {sm.q, sm.k, sm.dout, sm.dv, sm.vn[s]}) zero_rows(tile, at.chunk.y);
    fence_async();
    meet(sm, meetings);
}

// Raw q and k become unit rows, once per group.
__device__ __forceinline__ void normalize_rows(const GradParams& p, GradSmem& sm, const Place& at, int& meetings) {
    const long long heads = p.value_heads / GROUP;
    wait_loaded(sm, QK, at.item);
    meet(sm, meetings);
    for (int i = threadIdx.x; i < 2 * C * 16; i += 384) {
        const int is_key = i / (C * 16), row = i / 16 % C, unit = i % 16;
        if (row >= at.chunk.y) continue;
        const float r = p.rstd[(is_key * heads + at.head) * p.tokens + at.chunk.x + row];
        uint4& x = *reinterpret_cast<uint4*>((is_key ? sm.k : sm.q) + unit / 8 * HALF + swizzled(row, unit % 8 * 16));
        const uint4 raw = x;
        x = make_uint4(pack(low_half(raw.x) * r, high_half(raw.x) * r), pack(low_half(raw.y) * r, high_half(raw.y) * r),
                       pack(low_half(raw.z) * r, high_half(raw.z) * r), pack(low_half(raw.w) * r, high_half(raw.w) * r));
    }
    fence_async();
    meet(sm, meetings);
}
// What a worker does before a step: tiles that are as the products want them.
__device__ __forceinline__ void ready_tiles(const GradParams& p, GradSmem& sm, const Place& at, int member, int& meetings) {
    if (at.chunk.y < C) clean_partial(sm, at, meetings);
    if (L2NORM && member == 0) normalize_rows(p, sm, at, meetings);
}

// A shared-memory address that the compiler does not carry through the loop in a register of its own.
__device__ __forceinline__ u32 fresh_addr(const void* x) {
    u32 address = smem_addr(x);
    asm volatile("" : "+r"(address));
    return address;
}

// Fragments of a [64 x 64] matrix as a swizzled bf16 tile.
__device__ __forceinline__ void store_tile(char* tile, const float (&x)[32], int t) {
    const u32 at = fresh_addr(tile) + swizzled(t / 32 * 16 + t % 32 / 4, t % 4 * 4);  // other units of 16 bytes: XOR
#pragma unroll
    for (int i = 0; i < 16; i++) store_shared((at ^ (i / 2 * 16)) + i % 2 * 1024, pack(x[i * 2], x[i * 2 + 1]));
}
__device__ __forceinline__ void init_barriers(GradSmem& sm) {
    const int readers[BUFFERS] = {12, 12, 12, 8, 8, 8, 12, 12};  // warps
    for (int i = 0; i < BUFFERS; i++) barrier_init(&sm.loaded[i], 1), barrier_init(&sm.freed[i], readers[i]);
    for (int i = 0; i < 2; i++) barrier_init(&sm.scalars_ready[i], 1), barrier_init(&sm.sums_ready[i], 12), barrier_init(&sm.sums_free[i], 1);
    barrier_init(&sm.pairs_ready, 128), barrier_init(&sm.pairs_free, 8), barrier_init(&sm.met, 384);
    fence_barrier_init();
}
