// prepare: per chunk and q/k head Q K^T and K K^T once, per value head T = diag b - diag b (N o D) diag b with
// N = (I + L diag b)^-1 L, L = strict(K K^T), D_ij = exp(g_i - g_j) of the cumulative gates.
//
// Grid: chunks x H, heads fastest (neighbours share rows of memory). Block: two warps per value head, at least one warpgroup. Reads 64
// rows of q and k and the chunk's beta and g; writes T in bf16, in strips of 16 rows as wide as the triangle is there, Q K^T [H, T, 64]
// in fp16, zero above the diagonal, as swizzled images, and the log bound of each chunk's map.
// L2NORM: q and k are raw; their norms scale the products and are written to rstd.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "group.cuh"
#include "inverse.cuh"

struct PrepareParams {
    TensorMap t[C / 16];         // strip s of T: [strips of that kind, HV, 16, 16 (s + 1)] bf16, boxes of 64 channels x 16 rows
    const __nv_bfloat16 *q, *k;  // row and head strides in elements below
    const float* beta;           // [T, HV]
    char* qk;                    // [H, T, 64] fp16, zero above the diagonal
    const int2* chunks;          // first row, count
    const int4* ranks;           // the number of each strip among those of its kind
    long long q_row, q_head, k_row, k_head;
    int tokens, value_heads;
    const float* g;              // [T, HV]
    float* bound;                // [HV, chunks], or null
    float* rstd;                 // [2, H, T] (q, then k), L2NORM only
};

// ---- loads ----------------------------------------------------------------------------------------------------------
// All rows in flight at once; rows beyond the chunk's tokens become zero unread.
__device__ __forceinline__ void load_rows(const PrepareParams& p, PrepareSmem& sm, int2 chunk, u32 head, u32 t) {
    const u32 unit = t % 16, first = t / 16;  // sixteen threads a row
    const int rows_left = chunk.y - static_cast<int>(first);
#pragma unroll
    for (int is_key = 0; is_key < 2; is_key++) {
        const long long stride = is_key ? p.k_row : p.q_row;
        const __nv_bfloat16* x = is_key ? p.k + head * p.k_head : p.q + head * p.q_head;
        x += (chunk.x + static_cast<long long>(first)) * stride + unit * 8;
        const u32 at = smem_addr(sm.rows[is_key][unit / 8]) + swizzled(first, unit % 8 * 16);
#pragma unroll
        for (int i = 0; i < C; i += THREADS / 16) {  // a step of 4 rows (mod 8) exchanges units by 4
            if (C % (THREADS / 16) == 0 || first + i < C) copy_async16((at ^ i % 8 * 16) + i * 128, x, i < rows_left);
            x += stride * (THREADS / 16);
        }
    }
}

__device__ __forceinline__ void load_gates(const PrepareParams& p, PrepareSmem& sm, int2 chunk, u32 head, u32 t) {
#pragma unroll
    for (u32 i = 0; i < C * GROUP; i += THREADS) {
        const u32 row = (t + i) / GROUP, h = (t + i) % GROUP;
        const long long at = (chunk.x + static_cast<long long>(row)) * p.value_heads + head * GROUP + h;
        if (row >= C) break;
        copy_async4(&sm.beta[h][row], p.beta + at, static_cast<int>(row) < chunk.y);
        copy_async4(&sm.g[h][row], p.g + at, static_cast<int>(row) < chunk.y);
    }
}

// ---- products of rows, by the first warpgroup -----------------------------------------------------------------------
// X K^T of 64 rows; one product at a time, so that four blocks' registers fit a multiprocessor.
__device__ __forceinline__ void multiply_rows(float (&acc)[32], u32 x, u32 k) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 at = i / 4 * IMAGE + i % 4 * 32;
        wgmma_ss64(acc, descriptor(x + at, 1, 64), descriptor(k + at, 1, 64), i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
}

// |k|^2 of every row from the diagonal of K K^T.
__device__ __forceinline__ void key_norms(PrepareSmem& sm, const float (&kk)[32], u32 warp, u32 lane) {
    if (lane % 4 != lane / 8) return;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float x = lane / 4 % 2 ? kk[n * 4 + n % 2 * 2 + 1] : kk[n * 4 + n % 2 * 2];
        const float r = L2NORM ? rsqrtf(x + NORM_EPS) : 1.f;
        if (n / 2 == warp) sm.key_norm[n * 8 + lane / 4] = x * r * r, sm.rstd[1][n * 8 + lane / 4] = r;
    }
}

// Four lanes a row, by `warps` warps; beside the products where there are warps to spare.
__device__ __forceinline__ void query_norms(PrepareSmem& sm, u32 warp, u32 warps, u32 lane) {
    for (u32 row = warp * 8 + lane / 4; row < C; row += warps * 8) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 x = *reinterpret_cast<const uint4*>(sm.rows[0][i / 2] + swizzled(row, (i % 2 * 4 + lane % 4) * 16));
            const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; j++) sum += low_half(pairs[j]) * low_half(pairs[j]) + high_half(pairs[j]) * high_half(pairs[j]);
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane % 4 == 0) sm.rstd[0][row] = rsqrtf(sum + NORM_EPS);
    }
}

__device__ __forceinline__ void fold_norms(const PrepareSmem& sm, const float* rows, float (&acc)[32], u32 warp, u32 lane) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float row = rows[warp * 16 + lane / 4 + i % 2 * 8];
        const float2 column = *reinterpret_cast<const float2*>(&sm.rstd[1][i / 2 * 8 + lane % 4 * 2]);
        acc[i * 2] *= row * column.x, acc[i * 2 + 1] *= row * column.y;
    }
}

// A warp's 16 rows of L: operands left of its diagonal tile, fp32 in it.
__device__ __forceinline__ void store_lower(PrepareSmem& sm, const float (&kk)[32], u32 warp, u32 lane) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float* x = kk + j * 8;
        if (j < warp) {
            const Split a = split(x[0], x[1]), b = split(x[4], x[5]), c = split(x[2], x[3]), d = split(x[6], x[7]);
            sm.lower[warp * (warp - 1) / 2 + j][0][lane] = make_uint4(a.high, b.high, c.high, d.high);
            sm.lower[warp * (warp - 1) / 2 + j][1][lane] = make_uint4(a.low, b.low, c.low, d.low);
        } else if (j == warp) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 r = lane / 4 + i % 2 * 8, c = lane % 4 * 2 + i / 2 * 8;
                const float2 strict = make_float2(c < r ? x[i * 2] : 0.f, c + 1 < r ? x[i * 2 + 1] : 0.f);
                *reinterpret_cast<float2*>(&sm.diagonal[j][r * TILE_ROW + c]) = strict;
            }
        }
    }
}

// A warp's 16 rows of Q K^T: an image in shared memory, copied out while the inverse runs.
__device__ __forceinline__ void store_scores(PrepareSmem& sm, const float (&qk)[32], char* out, int count, u32 warp, u32 lane) {
    char* strip = sm.images[0] + warp * 16 * 128;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 r = warp * 16 + lane / 4 + i / 2 % 2 * 8, c = j * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2;
            x[i] = c <= r ? qk[j * 8 + i] : 0.f;
        }
        const u32 at = smem_addr(strip) + swizzled(lane % 16, j * 32 + lane / 16 * 16);
        stmatrix(at, pack_half(x[0], x[1]), pack_half(x[2], x[3]), pack_half(x[4], x[5]), pack_half(x[6], x[7]));
    }
    fence_async();
    __syncwarp();
    const int rows = min(count - static_cast<int>(warp) * 16, 16);
    if (lane == 0 && rows > 0) bulk_store(out + warp * 16 * 128, strip, rows * 128);
}

// ---- bounds ---------------------------------------------------------------------------------------------------------
// The chunk's log bound, 32 tokens a warp in a fixed tree: sum of g + log max(1, |1 - b |k|^2|).
__device__ __forceinline__ void half_bound(PrepareSmem& sm, u32 h, u32 half, u32 lane) {
    const u32 row = half * 32 + lane;
    float x = fmaxf(sm.g[h][row], GATE_FLOOR) + __logf(fmaxf(fabsf(1.f - sm.beta[h][row] * sm.key_norm[row]), 1.f));
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    if (lane == 0) sm.bound[h][half] = x;
}

// A head's image of T by one thread; the map cuts off what lies above the triangle's blocks.
__device__ __forceinline__ void store_inverse(const PrepareParams& p, const char* image, int index, int count, int head) {
    const int4 ranks = p.ranks[index];
    const int rank[C / 16] = {ranks.x, ranks.y, ranks.z, ranks.w};
#pragma unroll
    for (int i = 0; i < C / 16; i++)
        if (i * 16 < count) strip_store(&p.t[i], image + i * (IMAGE / 4), (rank[i] * p.value_heads + head) * 16);
}

// ---- one block ------------------------------------------------------------------------------------------------------
// From q and k in shared memory to L there and Q K^T on its way out.
__device__ __forceinline__ void products(const PrepareParams& p, PrepareSmem& sm, int2 chunk, u32 head, u32 heads, u32 t, u32 warp) {
    const u32 lane = t % 32, q = smem_addr(sm.rows[0]), k = smem_addr(sm.rows[1]);
    float acc[32];
    if (warp < 4) {
        multiply_rows(acc, k, k);
        key_norms(sm, acc, warp, lane);
        if (L2NORM) {
            named_barrier<GROUP + 1, 128>();
            fold_norms(sm, sm.rstd[1], acc, warp, lane);
        }
        store_lower(sm, acc, warp, lane);
        multiply_rows(acc, q, k);
        if (L2NORM && WARPS == 4) query_norms(sm, warp, 4, lane);
    } else if (L2NORM) {
        query_norms(sm, warp - 4, WARPS - 4, lane);
    }
    __syncthreads();  // from here on the rows' memory holds images
    const long long first_row = static_cast<long long>(head) * p.tokens + chunk.x;
    if (warp < 4) {
        if (L2NORM) fold_norms(sm, sm.rstd[0], acc, warp, lane);
        store_scores(sm, acc, p.qk + first_row * 128, chunk.y, warp, lane);
    }
    const u32 tensor = t / C, row = t % C;
    if (L2NORM && tensor < 2 && static_cast<int>(row) < chunk.y)
        p.rstd[static_cast<long long>(tensor) * heads * p.tokens + first_row + row] = sm.rstd[tensor][row];
}

extern "C" __device__ const int shared_bytes = sizeof(PrepareSmem);  // asked for at the launch

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) prepare(const __grid_constant__ PrepareParams p) {
    extern __shared__ __align__(1024) char raw[];
    PrepareSmem& sm = *reinterpret_cast<PrepareSmem*>(raw);
    const u32 t = threadIdx.x, lane = t % 32, warp = __shfl_sync(~0u, t / 32, 0), heads = static_cast<u32>(p.value_heads) / GROUP;
    const u32 head = blockIdx.x % heads, index = blockIdx.x / heads;
    const int2 chunk = p.chunks[index];
    load_gates(p, sm, chunk, head, t);
    load_rows(p, sm, chunk, head, t);
    copy_async_wait();
    fence_async();
    __syncthreads();
    products(p, sm, chunk, head, heads, t, warp);
    const u32 h = warp / 2, half = warp % 2, value_head = head * GROUP + h;
    if (h < GROUP) {
        half_bound(sm, h, half, lane);  // also where nobody asked: without a branch its latency hides under the inverse
        scan_gates(sm, h, half, lane);
        invert(sm, h, half, lane);
        gate_rows(sm, h, half, lane);
        fence_async();
        pair_barrier(h + 1);
        if (half == 0 && lane == 0) store_inverse(p, sm.images[1 + h], index, chunk.y, value_head);
        if (half == 0 && lane == 0 && p.bound)
            p.bound[static_cast<long long>(value_head) * (gridDim.x / heads) + index] = sm.bound[h][0] + sm.bound[h][1];
    }
    if (lane == 0) bulk_wait_read<0>();  // the copies out still read this block's memory
}
