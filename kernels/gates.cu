// gates: of the projection b | a of a token's heads the log decay g = -exp(A_log) softplus(a + dt_bias) and beta = factor sigmoid(b).
// BACKWARD: the projection's gradient, and per tile of tokens the sums that make those of A_log and dt_bias.
//
// Grid: (blocks of 32 heads, tiles of TILE tokens). Block: 32 heads x 8 tokens at once. One pass over everything; fp32 throughout, by the
// accurate functions. A tile's sums: each thread down its tokens, then the block's 8 in a tree.
#include "pointwise.cuh"

#ifndef BACKWARD
#define BACKWARD 0
#endif
constexpr int TILE = 256, SLICES = 8;

struct GatesParams {
    const unsigned short* ba;  // bf16 [T, 2 heads], rows `stride` numbers apart
    const float *a_log, *dt_bias;
    float *g, *beta;           // [T, heads]; BACKWARD: their gradients, which are read
    unsigned short* dba;       // BACKWARD: bf16 [T, 2 heads], dense
    float* sums;               // BACKWARD: [tiles, 2, heads], of A_log, then of dt_bias
    long long stride;
    float factor;
    int tokens, heads;
};

__device__ __forceinline__ float as_float(unsigned short x) { return __uint_as_float(static_cast<u32>(x) << 16); }
__device__ __forceinline__ float softplus(float x) { return __fadd_rn(fmaxf(x, 0.f), log1pf(expf(-fabsf(x)))); }

struct Head { float rate, bias; };  // exp(A_log)

__device__ __forceinline__ void forward(const GatesParams& p, const Head& head, int t, int h) {
    const unsigned short* row = p.ba + t * p.stride + h;
    const long long at = static_cast<long long>(t) * p.heads + h;
    p.g[at] = __fmul_rn(-head.rate, softplus(__fadd_rn(as_float(row[p.heads]), head.bias)));
    p.beta[at] = __fmul_rn(p.factor, sigmoid(as_float(row[0])));
}

__device__ __forceinline__ void backward(const GatesParams& p, const Head& head, float (&sum)[2], int t, int h) {
    const unsigned short* row = p.ba + t * p.stride + h;
    const long long at = static_cast<long long>(t) * p.heads + h;
    const float x = __fadd_rn(as_float(row[p.heads]), head.bias), b = as_float(row[0]), scaled = __fmul_rn(-head.rate, p.g[at]);
    const float da = __fmul_rn(scaled, sigmoid(x));
    // 1 - sigmoid(b) is sigmoid(-b), which keeps its digits where sigmoid(b) rounds to 1
    const float db = __fmul_rn(__fmul_rn(__fmul_rn(p.factor, p.beta[at]), sigmoid(b)), sigmoid(-b));
    sum[0] = __fmaf_rn(scaled, softplus(x), sum[0]), sum[1] = __fadd_rn(sum[1], da);
    unsigned short* out = p.dba + static_cast<long long>(t) * 2 * p.heads + h;
    out[0] = static_cast<unsigned short>(pack_bf16(db, 0.f)), out[p.heads] = static_cast<unsigned short>(pack_bf16(da, 0.f));
}

extern "C" __global__ void __launch_bounds__(32 * SLICES) gates(const __grid_constant__ GatesParams p) {
    const int lane = threadIdx.x % 32, slice = threadIdx.x / 32, h = blockIdx.x * 32 + lane;
    const int first = blockIdx.y * TILE, end = min(first + TILE, p.tokens);
    const bool inside = h < p.heads;
    const Head head = inside ? Head{expf(p.a_log[h]), p.dt_bias[h]} : Head{};
    float sum[2] = {};
    if (inside)
#pragma unroll 4
        for (int t = first + slice; t < end; t += SLICES)
            if (BACKWARD) backward(p, head, sum, t, h);
            else forward(p, head, t, h);
#if BACKWARD
    __shared__ float part[2][SLICES][32];
#pragma unroll
    for (int i = 0; i < 2; i++) part[i][slice][lane] = sum[i];
#pragma unroll
    for (int half = SLICES / 2; half; half /= 2) {
        __syncthreads();
        if (slice < half)
#pragma unroll
            for (int i = 0; i < 2; i++) part[i][slice][lane] = sum[i] = __fadd_rn(sum[i], part[i][slice + half][lane]);
    }
    if (slice == 0 && inside)
#pragma unroll
        for (int i = 0; i < 2; i++) p.sums[(blockIdx.y * 2LL + i) * p.heads + h] = sum[i];
#endif
}
