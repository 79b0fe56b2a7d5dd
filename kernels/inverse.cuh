// What `prepare` does with L = strict(K K^T) in shared memory: N = (I + L diag b)^-1 L per value head, then T.
//
// N by 16 x 16 tiles, b_m the write strengths of tile m: the diagonal tiles N_jj by forward substitution in fp32, then down each column
//   X_i = L_ij (I - b_j N_jj) - sum_{j<m<i} L_im b_m N_mj,   N_ij = X_i - N_ii b_i X_i
// in tensor products of operands split into a high and a low fp16 part (three products), accumulated in fp32. All of it transposed: X^T
// and N^T leave as accumulators what the next product takes as left operand, so they never pass shared memory; L and N_ii are right
// operands in the order in which they are stored.
#pragma once
#include <cuda_fp16.h>
#include "ptx.cuh"

constexpr int C = 64;
constexpr int WARPS = GROUP == 1 ? 4 : 2 * GROUP, THREADS = 32 * WARPS;
constexpr int RESIDENT = 768 / THREADS;                  // blocks per multiprocessor that registers must allow
constexpr int IMAGE = C * 128;                           // 64 rows of 128 bytes, swizzled
constexpr int TILE_ROW = 20, TILE = 16 * TILE_ROW + 16;  // fp32; rows 16-byte aligned, neighbouring tiles half the banks apart
constexpr int GATE_ROW = C + 8;                          // fp32; 16-byte aligned, heads in different banks
constexpr float GATE_FLOOR = -104.f, BETA_FLOOR = 0x1p-40f, NORM_EPS = 1e-6f, LOG2_E = 1.4426950408889634f;

struct alignas(1024) PrepareSmem {
    union {
        char rows[2][2][IMAGE];         // q and k, two halves of 64 channels each
        char images[1 + GROUP][IMAGE];  // once the products are in registers: Q K^T, then each head's N and T
    };
    uint4 lower[6][2][32];     // tiles of L below its diagonal tiles, high and low parts, as each lane's operand registers
    float diagonal[4][TILE];   // diagonal tiles of L
    char low[GROUP][C * 32];   // low parts of the diagonal tiles of N
    float beta[GROUP][GATE_ROW], g[GROUP][GATE_ROW];
    float scan[GROUP][GATE_ROW], column[GROUP][GATE_ROW];  // cumulative gates in powers of two; b_j exp(g_last of j's tile - g_j)
    float key_norm[C], rstd[2][C];  // |k|^2 as the products have it; 1 / |q|, 1 / |k|
    float bound[GROUP][2];
};

// ---- halves ---------------------------------------------------------------------------------------------------------
__device__ __forceinline__ u32 pack_half(float x, float y) {
    const __half2 packed = __floats2half2_rn(x, y);
    return *reinterpret_cast<const u32*>(&packed);
}
__device__ __forceinline__ float2 unpack_half(u32 x) { return __half22float2(*reinterpret_cast<const __half2*>(&x)); }

struct Split { u32 high, low; };
__device__ __forceinline__ Split split(float x, float y) {  // x and y to 22 bits each
    const u32 high = pack_half(x, y);
    const float2 back = unpack_half(high);
    return {high, pack_half(x - back.x, y - back.y)};
}

// ---- the inverse ----------------------------------------------------------------------------------------------------
// Until a head's N is complete, its diagonal tiles lie transposed: the high parts in a tile of its image above the diagonal, the low
// parts in sm.low, rows of 32 bytes whose 16-byte units are exchanged so that eight rows cover all banks.
__device__ __forceinline__ u32 parked_rows(u32 tile) { return (tile < 3 ? tile : 0) * 2048; }
__device__ __forceinline__ u32 parked_column(u32 tile) { return (tile < 3 ? tile + 1 : 3) * 32; }
__device__ __forceinline__ u32 low_byte(u32 row, u32 unit) { return row * 32 + ((unit ^ row / 4) & 1) * 16; }

// One column of N inside its diagonal tile: x_i = L_ij - sum_{m<i} L_im b_m x_m. No store before the last load: the compiler cannot
// see that they do not overlap.
__device__ __forceinline__ void diagonal_column(PrepareSmem& sm, u32 h, u32 column) {
    const u32 tile = column / 16, j = column % 16;
    const float *l = sm.diagonal[tile], *beta = sm.beta[h] + tile * 16;
    float x[16], y[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float even = l[i * TILE_ROW + j], odd = 0.f;
#pragma unroll
        for (int m = 0; m < i; m += 4) {
            const float4 r = *reinterpret_cast<const float4*>(&l[i * TILE_ROW + m]);
            even -= r.x * y[m];
            if (m + 1 < i) odd -= r.y * y[m + 1];
            if (m + 2 < i) even -= r.z * y[m + 2];
            if (m + 3 < i) odd -= r.w * y[m + 3];
        }
        x[i] = even + odd;
        y[i] = beta[i] * x[i];
    }
    Split s[8];
#pragma unroll
    for (int i = 0; i < 8; i++) s[i] = split(x[i * 2], x[i * 2 + 1]);
    char* to = sm.images[1 + h] + parked_rows(tile);
#pragma unroll
    for (int u = 0; u < 2; u++) {
        const Split* a = s + u * 4;
        *reinterpret_cast<uint4*>(to + swizzled(j, parked_column(tile) + u * 16)) = make_uint4(a[0].high, a[1].high, a[2].high, a[3].high);
        *reinterpret_cast<uint4*>(sm.low[h] + low_byte(column, u)) = make_uint4(a[0].low, a[1].low, a[2].low, a[3].low);
    }
}

struct Operand { u32 high[4], low[4]; };  // 16 x 16; left: rows 0-7 and 8-15 of columns 0-7, then of 8-15

// acc += a b, the largest product last.
__device__ __forceinline__ void multiply(float (&acc)[2][4], const Operand& a, const Operand& b) {
#pragma unroll
    for (int n = 0; n < 2; n++) mma_fp16(acc[n], a.low, b.high[n * 2], b.high[n * 2 + 1]);
#pragma unroll
    for (int n = 0; n < 2; n++) mma_fp16(acc[n], a.high, b.low[n * 2], b.low[n * 2 + 1]);
#pragma unroll
    for (int n = 0; n < 2; n++) mma_fp16(acc[n], a.high, b.high[n * 2], b.high[n * 2 + 1]);
}

// X diag(scale) of an accumulator pair as left operand; scale holds this lane's four columns.
__device__ __forceinline__ Operand scaled(const float (&x)[2][4], float4 scale) {
    const Split a = split(x[0][0] * scale.x, x[0][1] * scale.y), b = split(x[0][2] * scale.x, x[0][3] * scale.y);
    const Split c = split(x[1][0] * scale.z, x[1][1] * scale.w), d = split(x[1][2] * scale.z, x[1][3] * scale.w);
    return {{a.high, b.high, c.high, d.high}, {a.low, b.low, c.low, d.low}};
}

// What a lane needs of its head: addresses of its rows in loads of parked tiles and in stores of N, its columns of beta.
struct Head { u32 parked, low, out; const float* beta; u32 lane; };

// N_jj^T as left operand, N_jj^T again as right operand.
__device__ __forceinline__ void load_left(const Head& x, int tile, Operand& a) {
    ldmatrix((x.parked ^ parked_column(tile)) + parked_rows(tile), a.high);
    ldmatrix(x.low + tile * 512, a.low);
}
__device__ __forceinline__ void load_right(const Head& x, int tile, Operand& b) {
    ldmatrix_trans((x.parked ^ parked_column(tile)) + parked_rows(tile), b.high);
    ldmatrix_trans(x.low + tile * 512, b.low);
}

// -b of this lane's four columns of tile i.
__device__ __forceinline__ float4 minus_beta(const Head& x, int i) {
    const float2 a = *reinterpret_cast<const float2*>(x.beta + i * 16), b = *reinterpret_cast<const float2*>(x.beta + i * 16 + 8);
    return make_float4(-a.x, -a.y, -b.x, -b.y);
}

// (I - b N_jj)^T as left operand.
__device__ __forceinline__ Operand first_operand(const Head& x, int j) {
    Operand stored;
    load_left(x, j, stored);
    float n[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 a = unpack_half(stored.high[i]), b = unpack_half(stored.low[i]);
        n[i / 2][i % 2 * 2] = a.x + b.x, n[i / 2][i % 2 * 2 + 1] = a.y + b.y;
    }
    Operand a = scaled(n, minus_beta(x, j));
    const u32 row = x.lane / 4, column = x.lane % 4 * 2;  // N_jj is strictly lower: the identity replaces zeros
    const u32 keep = row == column ? 0xffff0000u : row == column + 1 ? 0xffffu : ~0u, one = 0x3c003c00u & ~keep;
    a.high[0] = (a.high[0] & keep) | one;
    a.high[3] = (a.high[3] & keep) | one;
    return a;
}

// The tiles of N below diagonal tile J.
template <int J> __device__ __forceinline__ void tile_column(const PrepareSmem& sm, const Head& x) {
    Operand left[3 - J] = {first_operand(x, J)}, right;
#pragma unroll
    for (int i = J + 1; i < 4; i++) {
        float acc[2][4] = {};
#pragma unroll
        for (int m = J; m < i; m++) {
            const uint4 high = sm.lower[i * (i - 1) / 2 + m][0][x.lane], low = sm.lower[i * (i - 1) / 2 + m][1][x.lane];
            multiply(acc, left[m - J], {{high.x, high.y, high.z, high.w}, {low.x, low.y, low.z, low.w}});
        }
        const float4 scale = minus_beta(x, i);
        load_right(x, i, right);
        multiply(acc, scaled(acc, scale), right);
        const u32 first[2] = {pack_half(acc[0][0], acc[0][1]), pack_half(acc[0][2], acc[0][3])};
        const u32 second[2] = {pack_half(acc[1][0], acc[1][1]), pack_half(acc[1][2], acc[1][3])};
        stmatrix_trans((x.out ^ J * 32) + i * 2048, first[0], first[1], second[0], second[1]);
        if (i < 3) left[i - J] = scaled(acc, scale);
    }
}

// N of value head h of the group, by two warps.
__device__ __forceinline__ void invert(PrepareSmem& sm, u32 h, u32 half, u32 lane) {
    diagonal_column(sm, h, half * 32 + lane);
    pair_barrier(h + 1);
    char* image = sm.images[1 + h];
    const u32 parked = smem_addr(image) + swizzled(lane % 16, lane / 16 * 16), low = smem_addr(sm.low[h]) + low_byte(lane % 16, lane / 16);
    const u32 out = smem_addr(image) + swizzled(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16);
    const Head x = {parked, low, out, sm.beta[h] + lane % 4 * 2, lane};
    if (half == 0) {
        tile_column<0>(sm, x);
    } else {
        tile_column<1>(sm, x);
        tile_column<2>(sm, x);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Operand diagonal;
            load_right(x, i, diagonal);
            stmatrix((x.out ^ i * 32) + i * 2048, diagonal.high[0], diagonal.high[1], diagonal.high[2], diagonal.high[3]);
        }
    }
    pair_barrier(h + 1);
}

// The gates' scan, and what of D belongs to a column of a tile below the diagonal: D_ij = exp(g_i - g_m) exp(g_m - g_j) with m the last
// token of j's tile; both factors are at most 1.
__device__ __forceinline__ void scan_gates(PrepareSmem& sm, u32 h, u32 half, u32 lane) {
    float before = 0.f, scan = 0.f;
    for (u32 part = 0; part <= half; part++) {
        before = __shfl_sync(~0u, scan, 31);
        scan = fmaxf(sm.g[h][part * 32 + lane], GATE_FLOOR) * LOG2_E;
        for (int d = 1; d < 32; d *= 2) {
            const float other = __shfl_up_sync(~0u, scan, d);
            if (lane >= d) scan += other;
        }
    }
    scan += before;
    const float last = __shfl_sync(~0u, scan, lane | 15);
    sm.scan[h][half * 32 + lane] = scan;
    sm.column[h][half * 32 + lane] = fmaxf(sm.beta[h][half * 32 + lane], BETA_FLOOR) * exp2_approx(last - scan);
}

// Eight columns of a row of N in a tile below the diagonal, or in the diagonal tile, as bf16 of T.
__device__ __forceinline__ uint4 gated_unit(const PrepareSmem& sm, u32 h, u32 row, u32 unit, uint4 n, float factor) {
    const float4 low = *reinterpret_cast<const float4*>(&sm.column[h][unit * 8]), high = *reinterpret_cast<const float4*>(&sm.column[h][unit * 8 + 4]);
    const float2 a = unpack_half(n.x), b = unpack_half(n.y), c = unpack_half(n.z), d = unpack_half(n.w);
    return make_uint4(pack(a.x * low.x * factor, a.y * low.y * factor), pack(b.x * low.z * factor, b.y * low.w * factor),
                      pack(c.x * high.x * factor, c.y * high.y * factor), pack(d.x * high.z * factor, d.y * high.w * factor));
}
__device__ __forceinline__ uint4 diagonal_unit(const PrepareSmem& sm, u32 h, u32 row, u32 unit, uint4 n, float scan, float strength) {
    const u32 packed[4] = {n.x, n.y, n.z, n.w};
    float x[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        const u32 m = unit * 8 + i;
        const float2 pair = unpack_half(packed[i / 2]);
        const float decay = exp2_approx(scan - sm.scan[h][m]) * fmaxf(sm.beta[h][m], BETA_FLOOR);
        x[i] = m < row ? -(i % 2 ? pair.y : pair.x) * strength * decay : m == row ? strength : 0.f;
    }
    return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

// N -> T in its image, a row a thread.
__device__ __forceinline__ void gate_rows(PrepareSmem& sm, u32 h, u32 half, u32 lane) {
    const u32 row = half * 32 + lane;
    const float scan = sm.scan[h][row], strength = fmaxf(sm.beta[h][row], BETA_FLOOR);
    char* image = sm.images[1 + h];
#pragma unroll
    for (u32 tile = 0; tile < 4; tile++) {
        const float factor = tile < row / 16 ? -strength * exp2_approx(scan - sm.scan[h][tile * 16 + 15]) : 0.f;
#pragma unroll
        for (u32 unit = tile * 2; unit < tile * 2 + 2; unit++) {
            uint4& at = *reinterpret_cast<uint4*>(image + swizzled(row, unit * 16));
            if (tile < row / 16) at = gated_unit(sm, h, row, unit, at, factor);
            else at = tile == row / 16 ? diagonal_unit(sm, h, row, unit, at, scan, strength) : make_uint4(0, 0, 0, 0);
        }
    }
}
