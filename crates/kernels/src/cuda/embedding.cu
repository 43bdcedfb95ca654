// Embedding lookup and its gradient.
//
// The gradient sums rows of dy by id without floating-point atomics, so that it is deterministic: a stable radix sort
// orders tokens by id, each run of one id is cut into chunks of CHUNK tokens, and a block sums one chunk in token
// order. Runs of one chunk are done then; longer runs leave partial sums, which a last kernel adds in order.
#include "args/embedding.cuh"
#include "vec.cuh"

constexpr int CHUNK = 64;


// Block t: y[t] = scale·table[ids[t] − first] (+ y[t]); rows outside this rank's shard of the table count as zero.
template <class T> __device__ __forceinline__ void embedding_forward(const EmbeddingForwardArgs& p) {
    constexpr int N = VecWidth<T>::count;
    i64 t = blockIdx.x;
    i64 id = reinterpret_cast<const i32*>(p.ids)[t];
    if (id < 0 || id >= p.vocab) {
        if (threadIdx.x == 0) fault(p.fault, FAULT_ID);
        return;
    }
    T* y = reinterpret_cast<T*>(p.y) + t * p.width;
    id -= p.first;
    if (id < 0 || id >= p.local) {
        if (p.add) return;
        Vec<T, N> zero = {};
        for (i64 at = i64(threadIdx.x) * N; at < p.width; at += i64(blockDim.x) * N)
            store_guarded<N>(y, at, p.width, p.vectorized, zero);
        return;
    }
    const T* row = reinterpret_cast<const T*>(p.table) + id * p.width;
#pragma unroll 2
    for (i64 at = i64(threadIdx.x) * N; at < p.width; at += i64(blockDim.x) * N) {
        Vec<T, N> x = load_guarded<N>(row, at, p.width, p.vectorized), old = {};
        if (p.add) old = load_guarded<N>(y, at, p.width, p.vectorized);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float v = __fmul_rn(to_f32(x.at[i]), p.scale);
            x.at[i] = from_f32<T>(p.add ? __fadd_rn(v, to_f32(old.at[i])) : v);
        }
        store_guarded<N>(y, at, p.width, p.vectorized, x);
    }
}
#define EMBEDDING_FORWARD(T, NAME) \
    extern "C" __global__ void __launch_bounds__(256) embedding_forward_##NAME(const EmbeddingForwardArgs p) { embedding_forward<T>(p); }
FOR_EACH_TYPE(EMBEDDING_FORWARD)

// Radix sort, least significant digit first, eight bits at a time. A block has a tile of TILE tokens, a warp ITEMS·32
// neighbouring ones.
constexpr int BINS = 256;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ITEMS = 8;
constexpr int TILE = ITEMS * THREADS;


// The first pass maps ids to rows of this rank's shard; ids outside it map to `local`, behind all rows, where no sum
// reads.
__device__ __forceinline__ u32 sort_key(const EmbeddingSortArgs& p, i64 i) {
    u32 id = reinterpret_cast<const u32*>(p.ids)[i];
    if (!p.first) return id;
    i64 row = i64(id) - p.start;
    return i64(id) < p.vocab && row >= 0 && row < p.local ? u32(row) : u32(p.local);
}

extern "C" __global__ void __launch_bounds__(THREADS) embedding_count(const EmbeddingSortArgs p) {
    __shared__ u32 bins[BINS];
    bins[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        i64 i = i64(blockIdx.x) * TILE + k * THREADS + threadIdx.x;
        if (i >= p.n) break;
        u32 id = sort_key(p, i);
        if (p.first && i64(reinterpret_cast<const u32*>(p.ids)[i]) >= p.vocab) fault(p.fault, FAULT_ID);
        atomicAdd(&bins[id >> p.shift & (BINS - 1)], 1u);
    }
    __syncthreads();
    reinterpret_cast<u32*>(p.counts)[i64(blockIdx.x) * BINS + threadIdx.x] = bins[threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(THREADS) embedding_sort(const EmbeddingSortArgs p) {
    __shared__ u32 bins[WARPS][BINS + 1];
    __shared__ u32 totals[WARPS];
    int digit = threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int w = 0; w < WARPS; w++) bins[w][digit] = 0;
    __syncthreads();

    // Rank of each token among those with its digit in this warp. Digit BINS marks tokens past the end.
    u32 ids[ITEMS], places[ITEMS];
    i64 start = i64(blockIdx.x) * TILE + warp * (ITEMS * 32) + lane;
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        i64 i = start + k * 32;
        ids[k] = i < p.n ? sort_key(p, i) : 0;
        u32 d = i < p.n ? ids[k] >> p.shift & (BINS - 1) : BINS;
        u32 same = __match_any_sync(~0u, d);
        u32 before = d < BINS ? bins[warp][d] : 0;
        __syncwarp();
        places[k] = before + __popc(same & ((1u << lane) - 1));
        if (d < BINS && lane == __ffs(same) - 1) bins[warp][d] = before + __popc(same);
        __syncwarp();
    }

    // Tokens with this digit in earlier tiles, and in all tiles.
    const u32* counts = reinterpret_cast<const u32*>(p.counts);
    u32 earlier = 0, all = 0;
#pragma unroll 4
    for (u32 tile = 0; tile < gridDim.x; tile++) {
        u32 c = counts[i64(tile) * BINS + digit];
        all += c;
        if (tile < blockIdx.x) earlier += c;
    }
    // Tokens with smaller digits: exclusive prefix sum over the block.
    u32 sum = all;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        u32 left = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += left;
    }
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    u32 base = sum - all + earlier;
    for (int w = 0; w < warp; w++) base += totals[w];
    // Then over the warps of this tile, in order.
    for (int w = 0; w < WARPS; w++) {
        u32 c = bins[w][digit];
        bins[w][digit] = base;
        base += c;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        i64 i = start + k * 32;
        if (i >= p.n) break;
        u32 to = bins[warp][ids[k] >> p.shift & (BINS - 1)] + places[k];
        reinterpret_cast<u32*>(p.ids_out)[to] = ids[k];
        reinterpret_cast<u32*>(p.tokens_out)[to] = p.first ? u32(i) : reinterpret_cast<const u32*>(p.tokens)[i];
    }
}


// starts[v] = the first position in sorted order whose id is not below v.
extern "C" __global__ void __launch_bounds__(256) embedding_starts(const EmbeddingSumArgs p) {
    i64 v = i64(blockIdx.x) * 256 + threadIdx.x;
    if (v > p.local) return;
    const u32* ids = reinterpret_cast<const u32*>(p.ids);
    i64 low = 0, high = p.n;
    while (low < high) {
        i64 middle = (low + high) / 2;
        if (i64(ids[middle]) < v) low = middle + 1;
        else high = middle;
    }
    reinterpret_cast<u32*>(p.starts)[v] = u32(low);
}

// Zeroes the gradient rows of ids that do not occur. One warp to a row.
extern "C" __global__ void __launch_bounds__(256) embedding_clear(const EmbeddingSumArgs p) {
    i64 v = i64(blockIdx.x) * 8 + (threadIdx.x >> 5);
    if (v >= p.local) return;
    const u32* starts = reinterpret_cast<const u32*>(p.starts);
    if (starts[v] != starts[v + 1]) return;
    float* row = reinterpret_cast<float*>(p.dtable) + v * p.width;
    Vec<float, 4> zero = {};
#pragma unroll 4
    for (i64 at = (threadIdx.x & 31) * 4; at < p.width; at += 128) store_guarded<4>(row, at, p.width, p.vectorized, zero);
}

// Row of `parts` for the chunk that begins at `place`. Within CHUNK places at most one first chunk of a long run
// begins (a run longer than CHUNK has no other beginning that near), and at most one later chunk (they are CHUNK apart
// until the run ends), so that no two chunks share a row.
__device__ __forceinline__ i64 part_of(i64 place, bool first) { return place / CHUNK * 2 + (first ? 0 : 1); }

// Block i: sum of the chunk that begins at position i, if one does.
template <class T> __device__ __forceinline__ void embedding_sum(const EmbeddingSumArgs& p) {
    constexpr int N = VecWidth<T>::count;
    constexpr int AHEAD = 4;
    __shared__ i64 tokens[CHUNK];
    i64 place = blockIdx.x;
    i64 id = reinterpret_cast<const u32*>(p.ids)[place];
    if (id >= p.local) return;
    const u32* starts = reinterpret_cast<const u32*>(p.starts);
    i64 start = starts[id], end = starts[id + 1];
    if ((place - start) % CHUNK != 0) return;
    bool single = end - start <= CHUNK;
    int count = int(end - place < CHUNK ? end - place : CHUNK);
    for (int i = threadIdx.x; i < count; i += blockDim.x) tokens[i] = reinterpret_cast<const u32*>(p.tokens)[place + i];
    __syncthreads();
    const T* dy = reinterpret_cast<const T*>(p.dy);
    float* out = single ? reinterpret_cast<float*>(p.dtable) + id * p.width
                        : reinterpret_cast<float*>(p.parts) + part_of(place, place == start) * p.width;
    for (i64 at = i64(threadIdx.x) * N; at < p.width; at += i64(blockDim.x) * N) {
        Vec<float, N> sum = {};
        if (single && p.accumulate) sum = load_guarded<N>(out, at, p.width, p.vectorized);
        int i = 0;
        for (; i + AHEAD <= count; i += AHEAD) {
            Vec<T, N> x[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) x[k] = load_guarded<N>(dy + tokens[i + k] * p.width, at, p.width, p.vectorized);
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    sum.at[j] = __fadd_rn(sum.at[j], __fmul_rn(p.scale, to_f32(x[k].at[j])));
        }
        for (; i < count; i++) {
            Vec<T, N> x = load_guarded<N>(dy + tokens[i] * p.width, at, p.width, p.vectorized);
#pragma unroll
            for (int j = 0; j < N; j++) sum.at[j] = __fadd_rn(sum.at[j], __fmul_rn(p.scale, to_f32(x.at[j])));
        }
        store_guarded<N>(out, at, p.width, p.vectorized, sum);
    }
}
#define EMBEDDING_SUM(T, NAME) \
    extern "C" __global__ void __launch_bounds__(256) embedding_sum_##NAME(const EmbeddingSumArgs p) { embedding_sum<T>(p); }
FOR_EACH_TYPE(EMBEDDING_SUM)

// Block (b, c): if a long run begins in positions b·CHUNK .. (b + 1)·CHUNK, adds its partial sums in order, in the
// columns of c.
extern "C" __global__ void __launch_bounds__(256) embedding_join(const EmbeddingSumArgs p) {
    __shared__ i64 found;
    const u32* ids = reinterpret_cast<const u32*>(p.ids);
    const u32* starts = reinterpret_cast<const u32*>(p.starts);
    if (threadIdx.x == 0) found = -1;
    __syncthreads();
    i64 place = i64(blockIdx.x) * CHUNK + threadIdx.x;
    if (threadIdx.x < CHUNK && place < p.n) {
        i64 id = ids[place];
        if (id < p.local && starts[id] == place && i64(starts[id + 1]) - place > CHUNK) found = place;
    }
    __syncthreads();
    place = found;
    i64 column = i64(blockIdx.y) * 256 + threadIdx.x;
    if (place < 0 || column >= p.width) return;
    i64 id = ids[place];
    i64 chunks = (i64(starts[id + 1]) - place + CHUNK - 1) / CHUNK;
    float* out = reinterpret_cast<float*>(p.dtable) + id * p.width + column;
    const float* parts = reinterpret_cast<const float*>(p.parts) + column;
    float sum = p.accumulate ? *out : 0.0f;
    sum += parts[part_of(place, true) * p.width];
    // Chunk c > 0 begins at place + c·CHUNK.
    parts += part_of(place, false) * p.width;
#pragma unroll 16
    for (i64 c = 1; c < chunks; c++) sum += parts[2 * c * p.width];
    *out = sum;
}
