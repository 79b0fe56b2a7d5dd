// sums: out[c] = the sum over r of in[r, c], in a fixed order: 32 slices of rows r = s, s + 32, .., one after the other, then a tree.
//
// Grid: blocks of 32 columns. Block: 32 warps, one per slice. Reads in [rows, columns] fp32 once.
constexpr int SLICES = 32;

struct SumsParams {
    const float* in;
    float* out;
    int rows, columns;
};

extern "C" __global__ void __launch_bounds__(32 * SLICES) sums(const __grid_constant__ SumsParams p) {
    __shared__ float part[SLICES][32];
    const int lane = threadIdx.x % 32, slice = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    float sum = 0.f;
    if (c < p.columns)
#pragma unroll 8
        for (int r = slice; r < p.rows; r += SLICES) sum += p.in[static_cast<long long>(r) * p.columns + c];
    part[slice][lane] = sum;
#pragma unroll
    for (int half = SLICES / 2; half; half /= 2) {
        __syncthreads();
        if (slice < half) part[slice][lane] = sum += part[slice + half][lane];
    }
    if (slice == 0 && c < p.columns) p.out[c] = sum;
}
