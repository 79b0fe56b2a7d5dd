// prepare: per chunk and q/k head Q K^T and K K^T once, per value head N = (I + strict(K K^T) diag b)^-1 strict(K K^T).
//
// Grid: (chunks, H). Block: 64 G threads, two warps per value head. Reads 64 rows of q and k and the chunk's beta; writes rows
// 0..count-1 of N [HV, T, 64] and Q K^T [H, T, 64] in fp16, each chunk as the swizzled image that the walk copies into shared memory.
// N by blocks: 16 x 16 diagonal blocks by forward substitution in fp32, then 16 -> 32 -> 64 by
//   N21 = (I - N22 diag b2) P,  P = K21 (I - diag b1 N11)
// in tensor products whose operands are split into a high and a low fp16 part (three products), accumulated in fp32.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "ptx.cuh"

#ifndef GROUP
#define GROUP 3
#endif
constexpr int C = 64, K = 128, WARPS = 2 * GROUP, THREADS = 32 * WARPS;
constexpr int ROW_STRIDE = K + 8;  // bf16 rows of q and k, 16 bytes apart in banks for ldmatrix
constexpr int STRIDE = C + 4;      // fp32 rows of K K^T and N stay 16-byte aligned

struct PrepareParams {
    const __nv_bfloat16 *q, *k;  // row and head strides in elements below
    const float* beta;           // [T, HV]
    __half* n;                   // [HV, T, 64]
    __half* qk;                  // [H, T, 64]
    const int2* chunks;          // first row, count
    long long q_row, q_head, k_row, k_head;
    int tokens, value_heads;
};

struct PrepareSmem {
    float kk[C * STRIDE];
    float beta[GROUP][C];
    union {
        __nv_bfloat16 rows[2][C * ROW_STRIDE];  // q and k, read before the first block of n is written
        float n[GROUP][C * STRIDE];
    };
};

// ---- products of bf16 rows ------------------------------------------------------------------------------------------
// 16 rows of X K^T (X = q or k) by one warp.
__device__ __forceinline__ void row_products(float (&acc)[8][4], const __nv_bfloat16* x, const __nv_bfloat16* key, int strip, int lane) {
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        u32 a[4];
        ldmatrix(smem_addr(&x[(strip * 16 + lane % 16) * ROW_STRIDE + k + lane / 16 * 8]), a);
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            u32 b[4];
            ldmatrix(smem_addr(&key[(n * 8 + lane / 16 * 8 + lane % 8) * ROW_STRIDE + k + lane / 8 % 2 * 8]), b);
            mma_bf16(acc[n], a, b[0], b[1]);
            mma_bf16(acc[n + 1], a, b[2], b[3]);
        }
    }
}

// K K^T, strictly lower, into shared memory; Q K^T to global memory.
__device__ __forceinline__ void store_products(const PrepareParams& p, PrepareSmem& sm, int2 chunk, int head, int warp, int lane) {
    char* out = reinterpret_cast<char*>(p.qk) + (static_cast<long long>(head) * p.tokens + chunk.x) * 128;
    for (int job = warp; job < 8; job += WARPS) {
        const int strip = job % 4, is_key = job / 4;
        float acc[8][4] = {};
        row_products(acc, sm.rows[is_key], sm.rows[1], strip, lane);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int r = strip * 16 + lane / 4 + i % 2 * 8, c = i / 2 * 8 + lane % 4 * 2;
            const float x = acc[i / 2][i % 2 * 2], y = acc[i / 2][i % 2 * 2 + 1];
            if (is_key) *reinterpret_cast<float2*>(&sm.kk[r * STRIDE + c]) = make_float2(c < r ? x : 0.f, c + 1 < r ? y : 0.f);
            else if (r < chunk.y) *reinterpret_cast<__half2*>(out + swizzled(r, c * 2)) = __floats2half2_rn(x, y);
        }
    }
}

// ---- the inverse ----------------------------------------------------------------------------------------------------
// Column j of its 16 x 16 diagonal block: x_i = kk_ij - sum_{m<i} kk_im b_m x_m; blocks above the diagonal become zero.
__device__ __forceinline__ void diagonal_column(const float* kk, const float* beta, float* n, int j) {
    const int base = j / 16 * 16;
    float y[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float* row = &kk[(base + i) * STRIDE + base];
        float x = kk[(base + i) * STRIDE + j], x1 = 0.f;
#pragma unroll
        for (int m = 0; m < i; m += 4) {
            const float4 r = *reinterpret_cast<const float4*>(row + m);
            x -= r.x * y[m];
            if (m + 1 < i) x1 -= r.y * y[m + 1];
            if (m + 2 < i) x -= r.z * y[m + 2];
            if (m + 3 < i) x1 -= r.w * y[m + 3];
        }
        x += x1;
        n[(base + i) * STRIDE + j] = x;
        y[i] = beta[base + i] * x;
    }
    for (int i = 0; i < base; i++) n[i * STRIDE + j] = 0.f;
}

struct Split { u32 high, low; };
__device__ __forceinline__ Split split(float x, float y) {  // x + y to 22 bits each
    const __half2 high = __floats2half2_rn(x, y);
    const float2 back = __half22float2(high);
    const __half2 low = __floats2half2_rn(x - back.x, y - back.y);
    return {*reinterpret_cast<const u32*>(&high), *reinterpret_cast<const u32*>(&low)};
}

// acc -= A diag(b) B for 16 rows of A [.., S] and S / 8 column tiles of B [S, S]; both fp32 in shared memory with rows of STRIDE.
template <int S> __device__ __forceinline__ void subtract_product(float (&acc)[S / 8][4], const float* a, const float* b, const float* beta, int lane) {
    const int row = lane / 4, pair = lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < S; k += 16) {
        Split left[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = row + i % 2 * 8, m = k + pair + i / 2 * 8;
            const float2 x = *reinterpret_cast<const float2*>(&a[r * STRIDE + m]);
            left[i] = split(-x.x * beta[m], -x.y * beta[m + 1]);
        }
        const u32 high[4] = {left[0].high, left[1].high, left[2].high, left[3].high};
        const u32 low[4] = {left[0].low, left[1].low, left[2].low, left[3].low};
#pragma unroll
        for (int n = 0; n < S / 8; n++) {
            const float* column = &b[(k + pair) * STRIDE + n * 8 + row];
            const Split first = split(column[0], column[STRIDE]), second = split(column[8 * STRIDE], column[9 * STRIDE]);
            mma_fp16(acc[n], low, first.high, second.high);
            mma_fp16(acc[n], high, first.low, second.low);
            mma_fp16(acc[n], high, first.high, second.high);
        }
    }
}

template <int S, typename Access> __device__ __forceinline__ void each_pair(float (&acc)[S / 8][4], int lane, Access access) {
#pragma unroll
    for (int n = 0; n < S / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) access((lane / 4 + i * 8) * STRIDE + n * 8 + lane % 4 * 2, acc[n][i * 2], acc[n][i * 2 + 1]);
}

// Rows strip..strip+15 of the block below the diagonal of a pair of S x S blocks that start at base.
template <int S, typename Sync> __device__ __forceinline__ void merge(const float* kk, const float* beta, float* n, int base, int strip, int lane, Sync sync) {
    const int below = (base + S + strip) * STRIDE + base;
    float acc[S / 8][4];
    each_pair<S>(acc, lane, [&](int at, float& x, float& y) { x = kk[below + at], y = kk[below + at + 1]; });
    subtract_product<S>(acc, kk + below, n + base * STRIDE + base, beta + base, lane);
    each_pair<S>(acc, lane, [&](int at, float& x, float& y) { n[below + at] = x, n[below + at + 1] = y; });
    sync();
    subtract_product<S>(acc, n + below + S, n + (base + S) * STRIDE + base, beta + base + S, lane);
    sync();
    each_pair<S>(acc, lane, [&](int at, float& x, float& y) { n[below + at] = x, n[below + at + 1] = y; });
    sync();
}

extern "C" __global__ void __launch_bounds__(THREADS) prepare(const __grid_constant__ PrepareParams p) {
    extern __shared__ __align__(16) char raw[];
    PrepareSmem& sm = *reinterpret_cast<PrepareSmem*>(raw);
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, head = blockIdx.y, first_value_head = head * GROUP;
    const int2 chunk = p.chunks[blockIdx.x];

    // Load q and k (zero beyond the chunk's tokens) and the write strengths.
    for (int i = t; i < 2 * C * K / 8; i += THREADS) {
        const int is_key = i / (C * K / 8), row = i / (K / 8) % C, unit = i % (K / 8);
        const __nv_bfloat16* x = is_key ? p.k + head * p.k_head : p.q + head * p.q_head;
        uint4 loaded = make_uint4(0, 0, 0, 0);
        if (row < chunk.y) loaded = *reinterpret_cast<const uint4*>(x + (chunk.x + row) * (is_key ? p.k_row : p.q_row) + unit * 8);
        *reinterpret_cast<uint4*>(&sm.rows[is_key][row * ROW_STRIDE + unit * 8]) = loaded;
    }
    for (int i = t; i < C * GROUP; i += THREADS) {
        const int row = i / GROUP, h = i % GROUP;
        sm.beta[h][row] = row < chunk.y ? p.beta[static_cast<long long>(chunk.x + row) * p.value_heads + first_value_head + h] : 0.f;
    }
    __syncthreads();
    store_products(p, sm, chunk, head, warp, lane);
    __syncthreads();

    // Invert: a pair of warps per value head.
    const int h = warp / 2, half = warp % 2;
    float *n = sm.n[h], *beta = sm.beta[h];
    diagonal_column(sm.kk, beta, n, half * 32 + lane);
    __syncwarp();  // a warp's 32 columns are the two diagonal blocks that it merges
    merge<16>(sm.kk, beta, n, half * 32, 0, lane, [] { __syncwarp(); });
    pair_barrier(h + 1);
    merge<32>(sm.kk, beta, n, 0, half * 16, lane, [&] { pair_barrier(h + 1); });

    // Store the rows that hold tokens, 16 bytes a thread.
    char* out = reinterpret_cast<char*>(p.n) + (static_cast<long long>(first_value_head + h) * p.tokens + chunk.x) * 128;
    for (int i = half * 32 + lane; i < chunk.y * 8; i += 64) {
        const int row = i / 8, unit = i % 8;
        const float4 x = *reinterpret_cast<const float4*>(&n[row * STRIDE + unit * 8]), y = *reinterpret_cast<const float4*>(&n[row * STRIDE + unit * 8 + 4]);
        const __half2 packed[4] = {__floats2half2_rn(x.x, x.y), __floats2half2_rn(x.z, x.w), __floats2half2_rn(y.x, y.y), __floats2half2_rn(y.z, y.w)};
        *reinterpret_cast<uint4*>(out + swizzled(row, unit * 16)) = *reinterpret_cast<const uint4*>(packed);
    }
}
