// Which chunks of a segment cannot reach its other end by more than the decay cutoff, and which maps count as zero.
//
// With after(c) = the log bound of the chunks that follow c in the segment (c itself left out), a summary starts at the first chunk
// with after(c) > cutoff; the adjoint ends at the last one with before(c) > cutoff; a map whose whole bound is not above the cutoff is
// zero. A pure function of the segment's own tokens.
#pragma once

__device__ __forceinline__ float suffix_sum(float x, int lane) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const float other = __shfl_down_sync(~0u, x, d);
        if (lane + d < 32) x += other;
    }
    return x;
}

// First kept chunk from the end's side, found by a warp; `flip` counts chunks from the other end. Returns chunks to skip, and the
// bound of all.
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
