// fold: takes a list of affine hops, states[dst] = M[map] states[src] + offsets[offset], where chains of hops do not depend on
// each other. With offsets null and the maps as states it composes maps.
//
// Grid: (chains x 8 blocks of 16 columns, heads). Block: 256 threads, serial over the hops of its chain; the state stays in shared
// memory, the next map is on its way into registers while the current one is applied.
// Order of a sum, whatever the call: thread "key" adds k = 4 key .. 4 key + 3, 64 + 4 key .. 64 + 4 key + 3 in this order by fused
// multiply-adds, then the 16 threads of a row add up in a fixed tree. fp32 throughout.
// TRANSPOSED applies M^T (the adjoint). A map that is zero (the decay bound dropped it) makes the hop a copy of the offset: `dropped`
// says so before it is read, without it the block looks.
#include "ptx.cuh"

#ifndef TRANSPOSED
#define TRANSPOSED 0
#endif
constexpr int K = 128, COLUMNS = 16, THREADS = 256, STRIDE = K + 4;

struct Hop { int dst, src, offset, map; };  // map < 0: a chain starts, the offset alone is the state

struct FoldParams {
    float* states;         // [.., heads, 128, 128]
    const float* maps;     // likewise
    const float* offsets;  // likewise, or null
    const Hop* hops;
    const int* chains;     // [chains + 1], first hop of each
    int* dropped;          // [maps, heads], not 0 where a map is zero; or null. Without offsets it takes the flags of the products
    int heads;
};

struct FoldSmem { float state[2][COLUMNS * STRIDE]; };  // column after column

// Thread: 8 rows and 8 values of k of the map. Slot j holds row (j ^ turn), so that a sum over threads sends the same slots
// everywhere; `right` says which half of the columns a thread ends up with.
struct Role { int key, rows, turn, right; };

using MapTile = float[8][8];  // k, slot

__device__ __forceinline__ float4 as_float4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ void unpack(float (&row)[8], int at, float4 x) { row[at] = x.x, row[at + 1] = x.y, row[at + 2] = x.z, row[at + 3] = x.w; }

// Slots not yet turned: neighbouring threads read neighbouring columns.
__device__ __forceinline__ void load_map(MapTile& m, const float* map, const Role& r) {
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (TRANSPOSED) {  // the row of M^T is a column of M; j counts k
                const int k = r.key * 4 + j % 4 + j / 4 * 64;
                unpack(m[j], half * 4, as_float4(map + k * K + r.rows + half * 4));
            } else {
                const float4 x = as_float4(map + (r.rows + j) * K + half * 64 + r.key * 4);
                m[half * 4][j] = x.x, m[half * 4 + 1][j] = x.y, m[half * 4 + 2][j] = x.z, m[half * 4 + 3][j] = x.w;
            }
        }
}

// Slot j from row j ^ turn, by exchanges that depend on one bit of `turn` each.
__device__ __forceinline__ void turn_rows(float (&x)[8], int turn) {
#pragma unroll
    for (int bit = 4; bit; bit /= 2)
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (!(j & bit)) {
                const float a = x[j], b = x[j | bit];
                x[j] = turn & bit ? b : a, x[j | bit] = turn & bit ? a : b;
            }
}

// Row (rows + turn) of M times the columns right * 8 .. + 7 of the state.
__device__ __forceinline__ void product(float (&out)[8], const MapTile& m, const float* state, const Role& r) {
#pragma unroll
    for (int c = 0; c < 8; c++) {
        float sum[2][8];
#pragma unroll
        for (int s = 0; s < 2; s++) {
            const float* column = state + (c + (s ^ r.right) * 8) * STRIDE + r.key * 4;
            float x[8];
            unpack(x, 0, as_float4(column)), unpack(x, 4, as_float4(column + 64));
#pragma unroll
            for (int j = 0; j < 8; j++) {
                sum[s][j] = 0.f;
#pragma unroll
                for (int k = 0; k < 8; k++) sum[s][j] = fmaf(m[k][j], x[k], sum[s][j]);
            }
#pragma unroll
            for (int keep = 4; keep; keep /= 2)
#pragma unroll
                for (int j = 0; j < keep; j++) sum[s][j] += __shfl_xor_sync(~0u, sum[s][j + keep], keep * 2);
        }
        out[c] = sum[0][0] + __shfl_xor_sync(~0u, sum[1][0], 1);
    }
}

__device__ __forceinline__ void fetch_state(float* state, const float* from, int t) {
    const int row = t / 2, first = t % 2 * 8;
#pragma unroll
    for (int c = 0; c < 8; c += 4) {
        const float4 x = as_float4(from + row * K + first + c);
        state[(first + c) * STRIDE + row] = x.x, state[(first + c + 1) * STRIDE + row] = x.y;
        state[(first + c + 2) * STRIDE + row] = x.z, state[(first + c + 3) * STRIDE + row] = x.w;
    }
}

struct Rows {  // where row x of a buffer of this block's head begins
    long long stride, head;
    __device__ __forceinline__ long long operator()(int row) const { return row * stride + head; }
};

__device__ __forceinline__ bool has_value(const MapTile& m) {
    u32 bits = 0;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int k = 0; k < 8; k++) bits |= __float_as_uint(m[j][k]);
    return bits << 1;  // -0 is zero
}

// What a block reads of its chain and head: `mine` is where this thread's 8 numbers lie in a state.
struct Reader {
    const FoldParams& p;
    int head, last, mine;
    Rows at;
    __device__ __forceinline__ Hop hop(int i) const { return i < last ? p.hops[i] : Hop{0, 0, 0, -1}; }
    __device__ __forceinline__ bool dropped(int map) const { return p.dropped[static_cast<long long>(map) * p.heads + head]; }
    __device__ __forceinline__ bool live(const Hop& hop) const { return hop.map >= 0 && !(p.dropped && dropped(hop.map)); }
    __device__ __forceinline__ void offset(float (&to)[8], const Hop& hop) const {
        if (!p.offsets) return;
        const float* from = p.offsets + at(hop.offset) + mine;
        unpack(to, 0, as_float4(from)), unpack(to, 4, as_float4(from + 4));
    }
};

__device__ __forceinline__ void copy_map(MapTile& to, const MapTile& from) {
#pragma unroll
    for (int k = 0; k < 8; k++)
#pragma unroll
        for (int j = 0; j < 8; j++) to[k][j] = from[k][j];
}

__device__ __forceinline__ void copy_row(float (&to)[8], const float (&from)[8]) {
#pragma unroll
    for (int c = 0; c < 8; c++) to[c] = from[c];
}
__device__ __forceinline__ void turn_map(MapTile& map, int turn) {
#pragma unroll
    for (int k = 0; k < 8; k++) turn_rows(map[k], turn);
}

// The new state: to global memory, and into the half of the buffer that nobody reads any more.
__device__ __forceinline__ void store_state(float* to, float* column, float (&out)[8], const float (&offset)[8]) {
#pragma unroll
    for (int c = 0; c < 8; c++) column[c * STRIDE] = out[c] += offset[c];
    *reinterpret_cast<float4*>(to) = make_float4(out[0], out[1], out[2], out[3]);
    *reinterpret_cast<float4*>(to + 4) = make_float4(out[4], out[5], out[6], out[7]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fold(const __grid_constant__ FoldParams p) {
    __shared__ __align__(16) FoldSmem sm;
    const int t = threadIdx.x, lane = t % 32, head = blockIdx.y, chain = blockIdx.x / (K / COLUMNS), block = blockIdx.x % (K / COLUMNS);
    const Role role{lane % 16, t / 32 * 16 + lane / 16 * 8, lane / 2 % 8, lane % 2};
    const Rows at{static_cast<long long>(p.heads) * K * K, static_cast<long long>(head) * K * K};
    const Reader read{p, head, p.chains[chain + 1], (role.rows + role.turn) * K + block * COLUMNS + role.right * 8, at};
    const bool composing = !p.offsets && p.dropped;
    int h = p.chains[chain], held = -1, current = 0;
    MapTile map, next;
    // Hops are read three ahead, flags two, maps and offsets one: nothing waits for what it has just asked for.
    Hop hop = read.hop(h), following = read.hop(h + 1), third = read.hop(h + 2);
    bool live = read.live(hop), following_live = read.live(following), state_live = true;  // the last is known when composing
    float next_offset[8] = {};
    if (live) load_map(next, p.maps + at(hop.map), role);
    read.offset(next_offset, hop);
    for (; h < read.last; h++) {
        copy_map(map, next);
        if (following_live) load_map(next, p.maps + at(following.map), role);
        const bool third_live = read.live(third);
        const Hop fourth = read.hop(h + 3);
        float offset[8], out[8] = {};
        copy_row(offset, next_offset);
        if (h + 1 < read.last) read.offset(next_offset, following);
        if (composing) {
            if (hop.src != held) state_live = !read.dropped(hop.src);
            state_live = live = live && state_live;
        }
        if (__syncthreads_or(live && (p.dropped || has_value(map)))) {
            if (hop.src != held) {
                fetch_state(sm.state[current], p.states + at(hop.src) + block * COLUMNS, t);
                __syncthreads();
            }
            turn_map(map, role.turn);
            product(out, map, sm.state[current], role);
        }
        if (composing && block == 0 && t == 0) p.dropped[static_cast<long long>(hop.dst) * p.heads + head] = !state_live;
        current ^= 1, held = hop.dst;  // who reads the other half of the buffer is behind the barrier above
        float* column = sm.state[current] + role.right * 8 * STRIDE + role.rows + role.turn;
        store_state(p.states + at(hop.dst) + read.mine, column, out, offset);
        hop = following, live = following_live, following = third, following_live = third_live, third = fourth;
    }
}
