// limits: which chunks of a segment cannot reach its other end by more than the decay cutoff, and which maps count as zero.
//
// One warp per segment and value head. With after(c) = the log bound of the chunks that follow c in the segment (c itself left out),
// a summary starts at the first chunk with after(c) > cutoff; the adjoint ends at the last one with before(c) > cutoff; a map whose
// whole bound is not above the cutoff is zero. A pure function of the segment's own tokens.
#include "ptx.cuh"

constexpr int WARPS = 8;

struct SegmentRow { int first_chunk, chunks, map, unused; };  // map: its row, -1 where none is needed

struct LimitsParams {
    const float* bound;          // [HV, N], log bound of every chunk
    const SegmentRow* segments;
    int* forward;                // [segments, HV], chunks to skip at the start of a summary
    int* adjoint;                // [segments, HV], chunks to skip at the end of an adjoint summary
    int* maps;                   // [segments, HV], the chunk count where the map is zero, else 0
    int* dropped;                // [maps, HV], 1 where the map is zero, else 0
    float cutoff;
    int chunks, num_segments, value_heads;
};

__device__ __forceinline__ float suffix_sum(float x, int lane) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const float other = __shfl_down_sync(~0u, x, d);
        if (lane + d < 32) x += other;
    }
    return x;
}

// First kept chunk from the end's side; `flip` counts chunks from the other end. Returns chunks to skip, and the bound of all.
__device__ __forceinline__ int skipped(const float* bound, int chunks, float cutoff, bool flip, int lane, float& total) {
    int first = chunks - 1;
    float after = 0.f;
    for (int base = (chunks - 1) / 32 * 32; base >= 0; base -= 32) {
        const int c = base + lane;
        const float sum = suffix_sum(c < chunks ? bound[flip ? chunks - 1 - c : c] : 0.f, lane);
        const float next = __shfl_down_sync(~0u, sum, 1);
        const float beyond = after + (lane < 31 ? next : 0.f);
        const unsigned kept = __ballot_sync(~0u, c < chunks && beyond > cutoff);
        if (kept) first = base + __ffs(kept) - 1;
        after += __shfl_sync(~0u, sum, 0);
    }
    total = after;
    return first;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) limits(const __grid_constant__ LimitsParams p) {
    const int lane = threadIdx.x % 32, pair = blockIdx.x * WARPS + threadIdx.x / 32;
    const int segment = pair / p.value_heads, head = pair % p.value_heads;
    if (segment >= p.num_segments) return;
    const SegmentRow row = p.segments[segment];
    const float* bound = p.bound + static_cast<long long>(head) * p.chunks + row.first_chunk;
    float total;
    const int at_end = skipped(bound, row.chunks, p.cutoff, true, lane, total);
    const int at_start = skipped(bound, row.chunks, p.cutoff, false, lane, total);
    if (lane) return;
    const bool zero = !(total > p.cutoff);
    p.forward[pair] = at_start, p.adjoint[pair] = at_end, p.maps[pair] = zero ? row.chunks : 0;
    if (row.map >= 0) p.dropped[row.map * p.value_heads + head] = zero;
}
