// Cross-entropy over rows of logits, one row to a block at a time. The smoothed target is `off` for every id and 1 − spread more
// at the label: loss = lse − Σ target·x, and with a gradient x ← (softmax − target)·w in place.
//
// A row is read once for its maximum and Σ exp(x − max) together (online softmax: a thread rescales its sum when its
// maximum grows), and once more to be overwritten. Where rows are long, blocks are persistent and hold what they can of a
// row in shared memory, so that the second time little of it is read from the GPU's memory; while a block overwrites a row it
// loads the next. With a vocabulary sharded over tensor-parallel ranks the two reads are two kernels, between which the ranks
// exchange their statistics.
#include "args/loss.cuh"

#define IGNORE (-100)

#define INFINITY_F __int_as_float(0x7f800000)
// 32-bit words of logits: −∞ in every element, and the larger elements of two words, where NaN is ignored.
template <class T> struct Word;
template <> struct Word<float> {
    static constexpr u32 neg_inf = 0xff800000u;
    static __device__ __forceinline__ u32 max(u32 a, u32 b) { return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b))); }
};
template <> struct Word<bf16> {
    static constexpr u32 neg_inf = 0xff80ff80u;
    static __device__ __forceinline__ u32 max(u32 a, u32 b) {
        asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
        return a;
    }
};
template <> struct Word<f16> {
    static constexpr u32 neg_inf = 0xfc00fc00u;
    static __device__ __forceinline__ u32 max(u32 a, u32 b) {
        asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
        return a;
    }
};

// eˣ for x ≤ 0. For 16-bit logits the hardware's ex2.approx of a rounded product is accurate enough.
template <class T> __device__ __forceinline__ float exponential(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}
template <> __device__ __forceinline__ float exponential<float>(float x) { return expf(x); }

__device__ __forceinline__ double block_sum(double x, double* shared) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
    __syncthreads();
    const int warps = blockDim.x >> 5;
    x = (threadIdx.x & 31) < warps ? shared[threadIdx.x & 31] : 0.0;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

// The first `count` columns of a row as aligned 16-byte chunks [first, last), and what is left at both ends. Chunk c
// starts at column c·V − skew: rows of odd length are each aligned differently.
template <class T> struct Cut {
    static constexpr int V = VecWidth<T>::count;
    i32 skew, first, last, head, tail, count;
    __device__ __forceinline__ Cut(const T* row, i32 count) : count(count) {
        skew = i32(reinterpret_cast<u64>(row) & 15) / i32(sizeof(T));
        first = skew ? 1 : 0;
        last = max((count + skew) / V, first);
        head = skew ? min(V - skew, count) : 0;
        tail = min(max(last * V - skew, head), count);
    }
    __device__ __forceinline__ i32 start(i32 chunk) const { return chunk * V - skew; }
    // The column at an end that this thread handles, or −1. There are fewer than 2V such columns, and a block has at
    // least 32 threads.
    __device__ __forceinline__ i32 end() const {
        const i32 t = threadIdx.x;
        if (t < head) return t;
        const i32 column = tail + (t - head);
        return column < count ? column : -1;
    }
};

template <class T> __device__ __forceinline__ void fill_zero(T* row, i32 count) {
    const Cut<T> cut(row, count);
    const i32 end = cut.end();
    if (end >= 0) row[end] = from_f32<T>(0.0f);
    for (i32 c = cut.first + threadIdx.x; c < cut.last; c += blockDim.x)
        *reinterpret_cast<Packed<T>*>(row + cut.start(c)) = {};
}

// Chunks of a thread whose loads are in flight together.
#define AT_ONCE 4

// Of the row that a block has next, the first `slots` chunks of every thread, 16 at most, in shared memory. A thread reads
// only what it copied there itself.
extern __shared__ uint4 held_chunks[];
template <class T> struct Held {
    i32 slots;
    // Starts copying chunks k .. k + AT_ONCE of every thread; nothing where there is no row.
    __device__ __forceinline__ void fetch(const T* row, i32 columns, i32 k) const {
        if (row) {
            const Cut<T> cut(row, columns);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const i32 slot = k + i, chunk = cut.first + threadIdx.x + slot * blockDim.x;
                if (slot < slots && chunk < cut.last) {
                    const u32 to = u32(__cvta_generic_to_shared(held_chunks + slot * blockDim.x + threadIdx.x));
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(row + cut.start(chunk)) : "memory");
                }
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    __device__ __forceinline__ void fetch_all(const T* row, i32 columns) const {
        for (i32 k = 0; k < slots; k += AT_ONCE) fetch(row, columns, k);
    }
    // Waits for chunks k .. k + AT_ONCE of the row, which were copied in this order and nothing after them.
    __device__ __forceinline__ void wait(i32 k) const {
        switch ((slots - 1 - k) / AT_ONCE) {
        case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
        case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
        case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
        default: asm volatile("cp.async.wait_group 3;" ::: "memory");
        }
    }
    __device__ __forceinline__ Packed<T> take(i32 slot, const T* from) const {
        if (slot >= slots) return *reinterpret_cast<const Packed<T>*>(from);
        const uint4 v = held_chunks[slot * blockDim.x + threadIdx.x];
        return {{v.x, v.y, v.z, v.w}};
    }
};

// A thread's running maximum, Σ exp(x − max) and, for label smoothing, Σ x.
template <class T> struct Running {
    float max = -INFINITY_F, sum = 0.0f;
    float all = 0.0f;
    // 0 while only −∞ has been seen, because −∞ − −∞ is NaN.
    __device__ __forceinline__ float shift() const { return max == -INFINITY_F ? 0.0f : max; }
    __device__ __forceinline__ void raise(float to) {
        if (to > max) {
            sum *= exponential<T>(max - to);
            max = to;
        }
    }
};

template <class T>
__device__ __forceinline__ Running<T> statistics(const T* row, i32 vocab, bool with_sum, Held<T> held) {
    constexpr int V = VecWidth<T>::count;
    Running<T> seen;
    const Cut<T> cut(row, vocab);
    const i32 end = cut.end();
    if (end >= 0) {
        const float x = to_f32(row[end]);
        seen.raise(x);
        seen.sum = exponential<T>(x - seen.shift());
        seen.all = x;
    }
    const i32 mine = cut.first + threadIdx.x;
    for (i32 k = 0; mine + k * i32(blockDim.x) < cut.last; k += AT_ONCE) {
        if (k < held.slots) held.wait(k);
        Packed<T> chunks[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const i32 chunk = mine + (k + i) * blockDim.x;
            // Absent chunks are −∞, which contributes exp(−∞) = 0.
#pragma unroll
            for (int w = 0; w < 4; w++) chunks[i].word[w] = Word<T>::neg_inf;
            if (chunk < cut.last) chunks[i] = held.take(k + i, row + cut.start(chunk));
        }
        u32 most = Word<T>::neg_inf;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (int w = 0; w < 4; w++) most = Word<T>::max(most, chunks[i].word[w]);
        float x[V];
        unpack(Packed<T>{{most, most, most, most}}, x);
        seen.raise(fmaxf(x[0], x[1]));
        const float shift = seen.shift();
        // One partial sum per chunk keeps long rows accurate.
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float part = 0.0f;
            unpack(chunks[i], x);
#pragma unroll
            for (int e = 0; e < V; e++) part += exponential<T>(x[e] - shift);
            seen.sum += part;
            if (with_sum && mine + (k + i) * i32(blockDim.x) < cut.last) {
                part = 0.0f;
#pragma unroll
                for (int e = 0; e < V; e++) part += x[e];
                seen.all += part;
            }
        }
    }
    return seen;
}

// Statistics of a row, or of one rank's columns of it.
struct RowStats {
    float max, sum, label, all;
};

// x ← (exp(x − max)/sum − off − (1 − spread)·1[column = label])·w for the first `present` columns, 0 for padding; starts
// copying the row that the block has next.
template <class T, class Args>
__device__ __forceinline__ void gradient(
    const Args& a, i32 present, T* row, i32 label, const RowStats& s, float w, Held<T> held, const T* next
) {
    constexpr int V = VecWidth<T>::count;
    const Cut<T> cut(row, present);
    const float factor = 1.0f / s.sum;
    auto slope = [&](float x) { return factor * exponential<T>(x - s.max) - a.off; };
    const float at_label = (slope(s.label) - (1.0f - a.spread)) * w;
    const i32 end = cut.end();
    if (end >= 0) row[end] = from_f32<T>(end == label ? at_label : slope(to_f32(row[end])) * w);
    const i32 mine = cut.first + threadIdx.x;
    for (i32 k = 0; k < held.slots || mine + k * i32(blockDim.x) < cut.last; k += AT_ONCE) {
        Packed<T> chunks[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const i32 chunk = mine + (k + i) * blockDim.x;
            if (chunk < cut.last) chunks[i] = held.take(k + i, row + cut.start(chunk));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const i32 chunk = mine + (k + i) * blockDim.x;
            if (chunk >= cut.last) continue;
            float x[V];
            unpack(chunks[i], x);
#pragma unroll
            for (int e = 0; e < V; e++) x[e] = slope(x[e]) * w;
            *reinterpret_cast<Packed<T>*>(row + cut.start(chunk)) = pack(x);
        }
        if (k < held.slots) held.fetch(next, present, k);
    }
    // The thread that has written the label's chunk corrects it.
    const i32 chunk = (label + cut.skew) / V - cut.first;
    if (label >= cut.head && label < cut.tail && chunk % i32(blockDim.x) == i32(threadIdx.x)) row[label] = from_f32<T>(at_label);
    for (i32 c = present + threadIdx.x; c < a.width; c += blockDim.x) row[c] = from_f32<T>(0.0f);
}

// Loss of a row from the statistics over the whole vocabulary.
template <class Args> __device__ __forceinline__ float loss_of(const Args& a, const RowStats& s) {
    const float log_sum = logf(s.sum);
    const float plain = log_sum - (s.label - s.max);
    const float mean = s.all / float(a.vocab);
    return a.spread != 0.0f ? (1.0f - a.spread) * plain + a.spread * (log_sum - (mean - s.max)) : plain;
}

// Statistics of the block's row, in every thread.
template <class T>
__device__ __forceinline__ RowStats row_stats(const T* row, i32 present, i32 label, bool with_sum, Held<T> held) {
    __shared__ float shared[32];
    __shared__ double shared_all[32];
    RowStats s;
    s.label = label >= 0 && label < present ? to_f32(row[label]) : 0.0f;
    const Running<T> seen = statistics(row, present, with_sum, held);
    s.max = block_max(seen.max, shared);
    // A thread that has seen nothing, or only −∞, has the sum 0; NaN propagates.
    const float own = seen.max == s.max ? seen.sum : seen.sum * exponential<T>(seen.max - s.max);
    s.sum = block_sum(own, shared);
    s.all = with_sum ? float(block_sum(seen.all, shared_all)) : 0.0f;
    return s;
}

// Row r, or nothing where there is none or it has no label.
template <class T> __device__ __forceinline__ T* labelled_row(const LossArgs& a, i64 r, i32 label) {
    return label >= 0 && label < a.vocab ? reinterpret_cast<T*>(a.logits) + r * a.stride : nullptr;
}
__device__ __forceinline__ i32 label_of(const LossArgs& a, i64 r) {
    return r < a.rows ? reinterpret_cast<const i32*>(a.labels)[r] : IGNORE;
}

// Every gridDim.x-th row.
template <class T, bool GRADIENT> __device__ __forceinline__ void cross_entropy(const LossArgs& a) {
    const Held<T> held = {GRADIENT ? a.slots : 0};
    i32 label = label_of(a, blockIdx.x);
    held.fetch_all(labelled_row<T>(a, blockIdx.x, label), a.vocab);
    for (i64 r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const i32 next_label = label_of(a, r + gridDim.x);
        if (T* row = labelled_row<T>(a, r, label)) {
            const RowStats s = row_stats(row, a.vocab, label, a.spread != 0.0f, held);
            if (threadIdx.x == 0) reinterpret_cast<float*>(a.loss)[r] = loss_of(a, s);
            if (GRADIENT)
                gradient(a, a.vocab, row, label, s, reinterpret_cast<const float*>(a.weights)[r], held,
                         labelled_row<T>(a, r + gridDim.x, next_label));
        } else {
            if (threadIdx.x == 0) {
                if (label != IGNORE) fault(a.fault, FAULT_LABEL);
                reinterpret_cast<float*>(a.loss)[r] = 0.0f;
            }
            if (GRADIENT) fill_zero(reinterpret_cast<T*>(a.logits) + r * a.stride, a.width);
            held.fetch_all(labelled_row<T>(a, r + gridDim.x, next_label), a.vocab);
        }
        label = next_label;
    }
}

// Whether row r has a label. A label outside the vocabulary that is not IGNORE is reported.
__device__ __forceinline__ bool labelled(const VocabParallelArgs& a, i64 r, i32& label, bool report) {
    label = reinterpret_cast<const i32*>(a.labels)[r];
    if (label >= 0 && label < a.vocab) return true;
    if (report && label != IGNORE) fault(a.fault, FAULT_LABEL);
    return false;
}

// Block r: statistics of row r over this rank's columns.
template <class T> __device__ __forceinline__ void shard_stats(const VocabParallelArgs& a) {
    const i64 r = blockIdx.x;
    i32 label;
    RowStats s = {-INFINITY_F, 0.0f, 0.0f, 0.0f};
    if (labelled(a, r, label, threadIdx.x == 0))
        s = row_stats(reinterpret_cast<const T*>(a.logits) + r * a.stride, a.present, label - a.first, true, Held<T>{0});
    if (threadIdx.x != 0) return;
    float* to = reinterpret_cast<float*>(a.stats) + r * 4;
    to[0] = s.max, to[1] = s.sum, to[2] = s.label, to[3] = s.all;
}

// Statistics of row r over all ranks, reduced in rank order: the same bits on every rank.
__device__ __forceinline__ RowStats merged(const VocabParallelArgs& a, i64 r) {
    const float* of = reinterpret_cast<const float*>(a.stats) + r * 4;
    RowStats s = {-INFINITY_F, 0.0f, 0.0f, 0.0f};
    for (i64 k = 0; k < a.ranks; k++) s.max = fmaxf(s.max, of[k * a.rows * 4]);
    for (i64 k = 0; k < a.ranks; k++) {
        const float* rank = of + k * a.rows * 4;
        // A sum of 0 means the rank has no column, or only −∞. NaN propagates.
        if (rank[1] != 0.0f) s.sum += rank[1] * expf(rank[0] - s.max);
        s.label += rank[2];
        s.all += rank[3];
    }
    return s;
}

// Block r: loss of row r, and the gradient of this rank's columns.
template <class T> __device__ __forceinline__ void shard_gradient(const VocabParallelArgs& a) {
    const i64 r = blockIdx.x;
    T* row = reinterpret_cast<T*>(a.logits) + r * a.stride;
    float* loss = reinterpret_cast<float*>(a.loss) + r;
    i32 label;
    if (!labelled(a, r, label, threadIdx.x == 0)) {
        if (threadIdx.x == 0) *loss = 0.0f;
        fill_zero(row, a.width);
        return;
    }
    const RowStats s = merged(a, r);
    if (threadIdx.x == 0) *loss = loss_of(a, s);
    const float w = reinterpret_cast<const float*>(a.weights)[r];
    gradient(a, a.present, row, label - a.first, s, w, Held<T>{0}, static_cast<const T*>(nullptr));
}

// Thread r: loss of row r without a gradient.
extern "C" __global__ void __launch_bounds__(256) vocab_parallel_cross_entropy_loss(const VocabParallelArgs a) {
    const i64 r = i64(blockIdx.x) * 256 + threadIdx.x;
    if (r >= a.rows) return;
    i32 label;
    reinterpret_cast<float*>(a.loss)[r] = labelled(a, r, label, true) ? loss_of(a, merged(a, r)) : 0.0f;
}

#define KERNELS(T, NAME)                                                                                          \
    extern "C" __global__ void __launch_bounds__(512, 2) cross_entropy_##NAME(const LossArgs a) {                 \
        cross_entropy<T, false>(a);                                                                               \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(1024, 1) cross_entropy_gradient_##NAME(const LossArgs a) {        \
        cross_entropy<T, true>(a);                                                                                \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(512, 2) cross_entropy_stats_##NAME(const VocabParallelArgs a) {          \
        shard_stats<T>(a);                                                                                        \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(512, 2) vocab_parallel_cross_entropy_##NAME(const VocabParallelArgs a) {          \
        shard_gradient<T>(a);                                                                                     \
    }

FOR_EACH_TYPE(KERNELS)
