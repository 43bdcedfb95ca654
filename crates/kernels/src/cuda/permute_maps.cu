// Row maps between token order and expert order: selections sorted by expert, chunks reordered, dense routing maps
// padded.
#include "args/permute_maps.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// Counting sort: each block counts the experts of a tile of TILE selections, prefix sums over tiles give where a tile's
// selections of an expert start, and a block places its tile. A warp has ITEMS·32 neighbouring selections, so that the sort
// is stable.
constexpr int ITEMS = 4;
constexpr int TILE = ITEMS * THREADS;


// Expert of selection i, counted from `first`; `experts` for none.
__device__ __forceinline__ u32 expert_of(const ExpertSortArgs& a, i64 i) {
    if (i >= a.selections) return a.experts;
    i64 e = i64(reinterpret_cast<const i32*>(a.index)[i]) - a.first;
    return e >= 0 && e < i64(a.experts) ? u32(e) : a.experts;
}

// Sum over the threads before this one; `total` gets the sum over the block. Synchronizes.
template <class T> __device__ __forceinline__ T sum_before(T x, T* shared, T& total) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    T sum = x;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        T left = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += left;
    }
    __syncthreads();
    if (lane == 31) shared[warp] = sum;
    __syncthreads();
    T before = 0;
    total = 0;
    for (int w = 0; w < int(blockDim.x >> 5); w++) {
        if (w < warp) before += shared[w];
        total += shared[w];
    }
    return before + sum - x;
}

extern "C" __global__ void __launch_bounds__(THREADS) sort_count(const ExpertSortArgs a) {
    extern __shared__ u32 bins[];
    u32 e[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; k++) e[k] = expert_of(a, i64(blockIdx.x) * TILE + k * THREADS + threadIdx.x);
    for (u32 i = threadIdx.x; i < a.experts; i += THREADS) bins[i] = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ITEMS; k++)
        if (e[k] < a.experts) atomicAdd(&bins[e[k]], 1u);
    __syncthreads();
    u32* out = reinterpret_cast<u32*>(a.tiles) + i64(blockIdx.x) * a.experts;
    for (u32 i = threadIdx.x; i < a.experts; i += THREADS) out[i] = bins[i];
}

// A block has 32 experts, one to a lane; its 32 warps have consecutive tiles.
extern "C" __global__ void __launch_bounds__(1024) sort_scan(const ExpertSortArgs a) {
    __shared__ u32 sums[32][32];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, e = blockIdx.x * 32 + lane;
    const bool live = e < a.experts;
    u32* tiles = reinterpret_cast<u32*>(a.tiles) + e;
    const u32 each = (a.tile_count + 31) / 32, first = warp * each, last = min(first + each, a.tile_count);
    u32 sum = 0;
#pragma unroll 4
    for (u32 t = first; t < last; t++) sum += live ? tiles[i64(t) * a.experts] : 0;
    sums[warp][lane] = sum;
    __syncthreads();
    u32 before = 0;
    for (u32 w = 0; w < warp; w++) before += sums[w][lane];
    if (!live) return;
    if (warp == 31) reinterpret_cast<u32*>(a.counts)[e] = before + sum;
#pragma unroll 4
    for (u32 t = first; t < last; t++) {
        u32 here = tiles[i64(t) * a.experts];
        tiles[i64(t) * a.experts] = before;
        before += here;
    }
}

// Blocks past the tiles, where there are more rows than selections, only mark rows without a source.
extern "C" __global__ void __launch_bounds__(THREADS) sort_place(const ExpertSortArgs a) {
    // u32 [WARPS, experts]: selections of a warp, then the row of the warp's next selection. Behind them [experts]: first
    // rows.
    extern __shared__ u32 bins[];
    __shared__ u32 scratch[WARPS];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, experts = a.experts;
    u32* mine = bins + warp * experts;
    u32* starts = bins + WARPS * experts;
    for (u32 i = threadIdx.x; i < WARPS * experts; i += THREADS) bins[i] = 0;
    __syncthreads();

    // Rank of each selection among those of its expert in this warp.
    u32 e[ITEMS], place[ITEMS];
    const i64 start = i64(blockIdx.x) * TILE + warp * (ITEMS * 32) + lane;
#pragma unroll
    for (int k = 0; k < ITEMS; k++) e[k] = expert_of(a, start + k * 32);
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        u32 same = __match_any_sync(~0u, e[k]);
        u32 before = e[k] < experts ? mine[e[k]] : 0;
        __syncwarp();
        place[k] = before + __popc(same & ((1u << lane) - 1));
        if (e[k] < experts && lane == u32(__ffs(same)) - 1) mine[e[k]] = before + __popc(same);
        __syncwarp();
    }

    // First rows of experts; a thread has `each` experts.
    const u32* counts = reinterpret_cast<const u32*>(a.counts);
    const u32 each = (experts + THREADS - 1) / THREADS;
    const u32 from = min(threadIdx.x * each, experts), to = min(from + each, experts);
    auto aligned = [&](u32 count) { return (count + a.align - 1) / a.align * a.align; };
    u32 sum = 0, end;
    for (u32 i = from; i < to; i++) sum += aligned(counts[i]);
    u32 row = sum_before(sum, scratch, end);
    i32* offsets = reinterpret_cast<i32*>(a.offsets);
    for (u32 i = from; i < to; i++) {
        starts[i] = row;
        if (blockIdx.x == 0) offsets[i] = i32(row);
        if (blockIdx.x < a.tile_count) {
            u32 at = row + reinterpret_cast<const u32*>(a.tiles)[i64(blockIdx.x) * experts + i];
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                u32 here = bins[w * experts + i];
                bins[w * experts + i] = at;
                at += here;
            }
        }
        row += aligned(counts[i]);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) offsets[experts] = i32(end);
    __syncthreads();

    i32* source = reinterpret_cast<i32*>(a.source);
    i32* rows = reinterpret_cast<i32*>(a.rows);
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const i64 i = start + k * 32;
        if (i >= a.selections) break;
        i32 r = -1;
        if (e[k] < experts) {
            r = i32(mine[e[k]] + place[k]);
            source[r] = i32(i);
        }
        rows[i] = r;
    }
    // Rows without a source: padding behind each expert, and behind all.
    for (u32 i = blockIdx.x * WARPS + warp; i < experts; i += gridDim.x * WARPS) {
        const u32 count = counts[i], last = starts[i] + aligned(count);
        for (u32 r = starts[i] + count + lane; r < last; r += 32) source[r] = -1;
    }
    for (i64 r = i64(end) + blockIdx.x * THREADS + threadIdx.x; r < a.n; r += i64(gridDim.x) * THREADS) source[r] = -1;
}


// One block: prefix sums of both orders.
extern "C" __global__ void __launch_bounds__(1024) chunk_starts(const ChunkMapArgs a) {
    __shared__ i64 scratch[32];
    const i32* sizes = reinterpret_cast<const i32*>(a.sizes);
    const i32* order = reinterpret_cast<const i32*>(a.order);
    i64* starts = reinterpret_cast<i64*>(a.starts);
    auto size = [&](u32 c) { return c < a.count ? min(max(i64(sizes[c]), i64(0)), a.n) : i64(0); };
    const u32 each = (a.count + 1023) / 1024, first = min(threadIdx.x * each, a.count), last = min(first + each, a.count);
    for (int way = 0; way < 2; way++) {
        i64 sum = 0, total;
        for (u32 c = first; c < last; c++) sum += size(way ? u32(order[c]) : c);
        i64 at = sum_before(sum, scratch, total);
        for (u32 c = first; c < last; c++) {
            starts[c] = at;
            at += size(way ? u32(order[c]) : c);
        }
        if (threadIdx.x == 0) starts[a.count] = total;
        starts += a.count + 1;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) chunk_rows(const ChunkMapArgs a) {
    const i64 r = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (r >= a.n) return;
    i32* source = reinterpret_cast<i32*>(a.source);
    i32* back = reinterpret_cast<i32*>(a.back);
    const i64* come = reinterpret_cast<const i64*>(a.starts);
    const i64* go = come + a.count + 1;
    if (r >= go[a.count]) {
        source[r] = back[r] = i32(r);
        return;
    }
    // The last chunk that starts at or before the row; empty chunks before it start there too.
    u32 low = 0, high = a.count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (go[middle] <= r) low = middle;
        else high = middle;
    }
    const i64 from = come[reinterpret_cast<const i32*>(a.order)[low]] + (r - go[low]);
    source[r] = i32(from);
    if (from < a.n) back[from] = i32(r);
}

// Dense routing maps: tiles of PAD_ROWS rows, 32 columns to a block.
constexpr int PAD_ROWS = 128;


extern "C" __global__ void __launch_bounds__(THREADS) pad_count(const PadMapArgs a) {
    __shared__ u32 sums[WARPS][32];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 e = i64(blockIdx.y) * 32 + lane, first = i64(blockIdx.x) * PAD_ROWS;
    const i64 last = min(first + PAD_ROWS, a.tokens);
    const u8* map = reinterpret_cast<const u8*>(a.map) + e;
    u32 sum = 0;
#pragma unroll 4
    for (i64 t = first + warp; t < last; t += WARPS) sum += e < a.experts && map[t * a.experts] != 0;
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || e >= a.experts) return;
    sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sums[w][lane];
    reinterpret_cast<u32*>(a.ones)[i64(blockIdx.x) * a.experts + e] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) pad_fill(const PadMapArgs a) {
    __shared__ u32 sums[2][WARPS][32];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 e = i64(blockIdx.y) * 32 + lane, first = i64(blockIdx.x) * PAD_ROWS;
    const bool live = e < a.experts;
    const u32* ones = reinterpret_cast<const u32*>(a.ones) + e;
    u32 all = 0, before = 0;
#pragma unroll 4
    for (u32 t = warp; t < a.tile_count; t += WARPS) {
        u32 here = live ? ones[i64(t) * a.experts] : 0;
        all += here;
        before += t < blockIdx.x ? here : 0;
    }
    sums[0][warp][lane] = all;
    sums[1][warp][lane] = before;
    __syncthreads();
    if (warp != 0 || !live) return;
    all = before = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += sums[0][w][lane], before += sums[1][w][lane];
    const i64 missing = i64((all + a.align - 1) / a.align) * a.align - all;
    i64 left = missing - (first - i64(before));
    const i64 last = min(first + PAD_ROWS, a.tokens);
    u8* map = reinterpret_cast<u8*>(a.map) + e;
    for (i64 t = first; t < last && left > 0; t++) {
        if (map[t * a.experts] == 0) {
            map[t * a.experts] = 1;
            left--;
        }
    }
}
