// spread: tables with an entry per value head, step or strip of a chunk, from those with an entry per item, pair or partial chunk. One
// launch per context makes all of them; thread i has the i-th entry of each table.
//
// Grid: as many blocks of THREADS as the longest table needs.
#include "ptx.cuh"

constexpr int THREADS = 256, NO_STATE = 1, NO_ADJOINT = 2;

struct Item { int first_chunk, chunks, packed, segment; };         // packed: head, and run << 16; see hopper_items
struct Pairs { int first_chunk, width, first_head, first_step; };  // steps of one item in one slab: `width` q/k heads side by side
struct Partial { int chunk, lacks[3]; };                           // before it: chunks without a second, a third, a fourth strip
struct Segment { int first_chunk, chunks, map, unused; };
struct Step { int row, count, head, chunk; };                      // head: of q/k, and flags << 16

struct SpreadParams {
    const Item *items, *mirrored;     // of the forward's walks, of the adjoint's
    const int2* places;               // [pairs], in steps
    const Pairs* pairs;               // by first step, ascending
    const Partial* partial;           // by chunk, ascending, and one behind the last chunk
    const int2* chunks;               // first row and count
    const Segment* segments;          // by first chunk, ascending
    const int2 *entries, *exits;      // of each segment, the first of both below 0 where the state (the adjoint) there is zero
    Item *items_out, *mirrored_out;   // [items, value_heads]
    Step* steps_out;
    int4* ranks_out;                  // [chunks], number of each strip among those of its kind
    int2* places_out;                 // [pairs, group]
    int num_items, num_mirrored, num_places, num_pairs, num_steps, num_chunks, num_partial, num_segments, value_heads, group;
};

// How many of the first `count` rows, ascending by their first number, are below `value`.
template <typename Row>
__device__ __forceinline__ int below(const Row* rows, int count, int value, int Row::*key) {
    int first = 0;
    while (first < count) {
        const int middle = (first + count) / 2;
        if (rows[middle].*key < value) first = middle + 1;
        else count = middle;
    }
    return first;
}

__device__ __forceinline__ void spread_item(Item* out, const Item* items, int i, int value_heads) {
    Item item = items[i / value_heads];
    item.packed += i % value_heads;
    out[i] = item;
}

__device__ __forceinline__ void spread_step(const SpreadParams& p, int i) {
    const Pairs of = p.pairs[below(p.pairs, p.num_pairs, i + 1, &Pairs::first_step) - 1];
    const int inside = i - of.first_step, chunk = of.first_chunk + inside / of.width;
    const int s = below(p.segments, p.num_segments, chunk + 1, &Segment::first_chunk) - 1;
    const Segment segment = p.segments[s];
    int flags = 0;
    if (chunk == segment.first_chunk && p.entries[s].x < 0) flags |= NO_STATE;
    if (chunk == segment.first_chunk + segment.chunks - 1 && p.exits[s].x < 0) flags |= NO_ADJOINT;
    p.steps_out[i] = Step{p.chunks[chunk].x, p.chunks[chunk].y, of.first_head + inside % of.width + (flags << 16), chunk};
}

__device__ __forceinline__ void spread_ranks(const SpreadParams& p, int chunk) {
    const Partial before = p.partial[below(p.partial, p.num_partial, chunk, &Partial::chunk)];
    p.ranks_out[chunk] = int4{chunk, chunk - before.lacks[0], chunk - before.lacks[1], chunk - before.lacks[2]};
}

extern "C" __global__ void __launch_bounds__(THREADS) spread(const __grid_constant__ SpreadParams p) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < p.num_items * p.value_heads) spread_item(p.items_out, p.items, i, p.value_heads);
    if (i < p.num_mirrored * p.value_heads) spread_item(p.mirrored_out, p.mirrored, i, p.value_heads);
    if (i < p.num_places * p.group) {
        const int2 at = p.places[i / p.group];
        p.places_out[i] = int2{at.x * p.group + i % p.group, at.y * p.group};
    }
    if (i < p.num_steps) spread_step(p, i);
    if (i < p.num_chunks) spread_ranks(p, i);
}
