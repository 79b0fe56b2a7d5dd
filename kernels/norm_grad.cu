// norm_grad: gradients of `norm_forward` with respect to o and z, and per tile of rows the sums that make the weight's.
//
// With n = o r, r = 1 / sqrt(mean(o^2) + eps), s = silu(z): do = r (dn - n mean(dn n)), dn = dy weight s; dz = dy n weight s'(z);
// dweight = sum over rows of dy n s. Grid: tiles of TILE rows; 16 threads a row, ROWS rows at once. Reads dy, o and z once, writes do and
// dz once and 128 numbers of fp32 per tile. Sums over a tile: each thread down its rows, then the block's 16 in a tree.
#include "norm.cuh"

constexpr int TILE = 1024;

struct NormGradParams {
    Tensor dy, o, z;
    const float* weight;  // [128]
    Bf16 *d_o, *d_z;      // [T, heads, 128]; d_o dense
    float* sums;          // [tiles, 128]
    long long dz_token;   // numbers from one token's row of d_z to the next; its heads are dense
    float eps;
    int rows, heads;
};

struct Raw { uint4 dy, o, z; };

__device__ __forceinline__ Raw fetch(const NormGradParams& p, int row, int c) {
    row = min(row, p.rows - 1);
    const int t = row / p.heads, h = row % p.heads;
    return {load(p.dy.at(t, h) + c), load(p.o.at(t, h) + c), load(p.z.at(t, h) + c)};
}

__device__ __forceinline__ void one_row(const NormGradParams& p, const Raw& raw, const Numbers& weight, Numbers& sum, int row, int c) {
    Numbers dy, n, z, dn;
    unpack(dy, raw.dy), unpack(n, raw.o), unpack(z, raw.z);
    const float scale = reciprocal_norm(n, p.eps);
    const bool inside = row < p.rows;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float gate = fast_sigmoid(z[j]), gated = __fmul_rn(z[j], gate), weighted = __fmul_rn(dy[j], weight[j]);
        n[j] = __fmul_rn(n[j], scale);
        sum[j] = __fmaf_rn(inside ? __fmul_rn(dy[j], n[j]) : 0.f, gated, sum[j]);
        dn[j] = __fmul_rn(weighted, gated);
        z[j] = __fmul_rn(__fmul_rn(weighted, n[j]), silu_slope(z[j], gate));
    }
    const float mean = __fmul_rn(row_dot(dn, n), 1.f / DIM);
#pragma unroll
    for (int j = 0; j < 8; j++) dn[j] = __fmul_rn(scale, __fmaf_rn(-n[j], mean, dn[j]));
    if (!inside) return;
    store(p.d_o + static_cast<long long>(row) * DIM + c, dn);
    store(p.d_z + row / p.heads * p.dz_token + row % p.heads * DIM + c, z);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) norm_grad(const __grid_constant__ NormGradParams p) {
    __shared__ float part[ROWS][DIM];
    const int c = threadIdx.x % LANES * 8, own = threadIdx.x / LANES, end = min(static_cast<int>(blockIdx.x + 1) * TILE, p.rows);
    Numbers weight, sum = {};
#pragma unroll
    for (int j = 0; j < 8; j++) weight[j] = p.weight[c + j];
    int row = blockIdx.x * TILE + own;
    Raw next = fetch(p, row, c), after = fetch(p, row + ROWS, c);
#pragma unroll 2
    for (; row - own < end; row += ROWS) {
        const Raw now = next;
        next = after, after = fetch(p, row + 2 * ROWS, c);
        one_row(p, now, weight, sum, row, c);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) part[own][c + j] = sum[j];
#pragma unroll
    for (int half = ROWS / 2; half; half /= 2) {
        __syncthreads();
        if (own < half)
#pragma unroll
            for (int j = 0; j < 8; j++) part[own][c + j] = __fadd_rn(part[own][c + j], part[own + half][c + j]);
    }
    if (own == 0)
#pragma unroll
        for (int j = 0; j < 8; j++) p.sums[static_cast<long long>(blockIdx.x) * DIM + c + j] = part[0][c + j];
}
