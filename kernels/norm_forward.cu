// norm_forward: y = o / sqrt(mean(o^2) + eps) * weight * silu(z), per token and head, in fp32 from bf16 to bf16.
//
// Grid: blocks of 16 x BATCH rows (a row is a token's head). 16 threads a row; reads o and z once, writes y once. A row's bits are its
// own matter: they depend on no other row.
#include "norm.cuh"

constexpr int BATCH = 4;  // rows of a thread, all on their way at once

struct NormParams {
    Tensor o, z;
    const float* weight;  // [128]
    Bf16* y;              // [T, heads, 128], dense
    float eps;
    int rows, heads;      // rows = T x heads
};

extern "C" __global__ void __launch_bounds__(THREADS) norm_forward(const __grid_constant__ NormParams p) {
    const int c = threadIdx.x % LANES * 8, first = blockIdx.x * ROWS * BATCH + threadIdx.x / LANES;
    uint4 raw_o[BATCH], raw_z[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const int row = min(first + i * ROWS, p.rows - 1), t = row / p.heads, h = row % p.heads;
        raw_o[i] = load(p.o.at(t, h) + c), raw_z[i] = load(p.z.at(t, h) + c);
    }
    Numbers weight;
#pragma unroll
    for (int j = 0; j < 8; j++) weight[j] = p.weight[c + j];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const int row = first + i * ROWS;
        Numbers o, z, y;
        unpack(o, raw_o[i]), unpack(z, raw_z[i]);
        const float scale = reciprocal_norm(o, p.eps);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float gated = __fmul_rn(z[j], fast_sigmoid(z[j]));
            y[j] = __fmul_rn(__fmul_rn(__fmul_rn(o[j], scale), weight[j]), gated);
        }
        if (row < p.rows) store(p.y + static_cast<long long>(row) * DIM + c, y);
    }
}
