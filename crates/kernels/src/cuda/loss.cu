// Cross-entropy over rows of logits, one block to a row. The smoothed target is `off` for every id and 1 − spread more
// at the label: loss = lse − Σ target·x, and with a gradient x ← (softmax − target)·w in place.
//
// A row is read once for its maximum and Σ exp(x − max) together (online softmax: a thread rescales its sum when its
// maximum grows), and once more to be overwritten. With a vocabulary sharded over tensor-parallel ranks these are two
// kernels, between which the ranks exchange their statistics.
#include "args/loss.cuh"

#define IGNORE (-100)



#define INFINITY_F __int_as_float(0x7f800000)
// −∞ in every element of a 32-bit word.
template <class T> struct NegInfWord;
template <> struct NegInfWord<float> {
    static constexpr u32 bits = 0xff800000u;
};
template <> struct NegInfWord<bf16> {
    static constexpr u32 bits = 0xff80ff80u;
};
template <> struct NegInfWord<f16> {
    static constexpr u32 bits = 0xfc00fc00u;
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

// A thread's running maximum, Σ exp(x − max) and, for label smoothing, Σ x.
template <class T> struct Running {
    float max = -INFINITY_F, sum = 0.0f;
    double all = 0.0;
    // 0 while only −∞ has been seen, because −∞ − −∞ is NaN.
    __device__ __forceinline__ float shift() const { return max == -INFINITY_F ? 0.0f : max; }
    __device__ __forceinline__ void raise(float to) {
        if (to > max) {
            sum *= exponential<T>(max - to);
            max = to;
        }
    }
};

// Chunks of a thread whose loads are in flight together.
#define AT_ONCE 4

template <class T> __device__ __forceinline__ Running<T> statistics(const T* row, i32 vocab, bool with_sum) {
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
    for (i32 c = cut.first + threadIdx.x; c < cut.last; c += blockDim.x * AT_ONCE) {
        Packed<T> held[AT_ONCE];
        i32 present = 0;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const i32 chunk = c + k * blockDim.x;
            // Absent chunks are −∞, which contributes exp(−∞) = 0.
#pragma unroll
            for (int w = 0; w < 4; w++) held[k].word[w] = NegInfWord<T>::bits;
            if (chunk < cut.last) {
                held[k] = *reinterpret_cast<const Packed<T>*>(row + cut.start(chunk));
                present++;
            }
        }
        float most = -INFINITY_F;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            float x[V];
            unpack(held[k], x);
#pragma unroll
            for (int i = 0; i < V; i++) most = fmaxf(most, x[i]);
        }
        seen.raise(most);
        const float shift = seen.shift();
        // One partial sum per chunk keeps long rows accurate.
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            float x[V], part = 0.0f;
            unpack(held[k], x);
#pragma unroll
            for (int i = 0; i < V; i++) part += exponential<T>(x[i] - shift);
            seen.sum += part;
            if (with_sum && k < present) {
                part = 0.0f;
#pragma unroll
                for (int i = 0; i < V; i++) part += x[i];
                seen.all += part;
            }
        }
    }
    return seen;
}

// x ← (factor·exp(x − max) − off − (1 − spread)·1[column = label])·w for the first `present` columns, 0 for padding.
template <class T, class Args>
__device__ __forceinline__ void gradient(
    const Args& a, i32 present, T* row, i32 label, float max, float factor, float w
) {
    constexpr int V = VecWidth<T>::count;
    const Cut<T> cut(row, present);
    auto slope = [&](float x, i32 column) {
        const float p = factor * exponential<T>(x - max) - a.off;
        return (column == label ? p - (1.0f - a.spread) : p) * w;
    };
    const i32 end = cut.end();
    if (end >= 0) row[end] = from_f32<T>(slope(to_f32(row[end]), end));
    for (i32 c = cut.first + threadIdx.x; c < cut.last; c += blockDim.x * AT_ONCE) {
        Packed<T> held[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const i32 chunk = c + k * blockDim.x;
            if (chunk < cut.last) held[k] = *reinterpret_cast<const Packed<T>*>(row + cut.start(chunk));
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const i32 chunk = c + k * blockDim.x;
            if (chunk >= cut.last) continue;
            float x[V];
            unpack(held[k], x);
#pragma unroll
            for (int i = 0; i < V; i++) x[i] = slope(x[i], cut.start(chunk) + i);
            *reinterpret_cast<Packed<T>*>(row + cut.start(chunk)) = pack(x);
        }
    }
    for (i32 c = present + threadIdx.x; c < a.width; c += blockDim.x) row[c] = from_f32<T>(0.0f);
}

// Statistics of a row, or of one rank's columns of it.
struct RowStats {
    float max, sum, label, all;
};

// Loss of a row from the statistics over the whole vocabulary.
template <class Args> __device__ __forceinline__ float loss_of(const Args& a, const RowStats& s) {
    const float log_sum = logf(s.sum);
    const float plain = log_sum - (s.label - s.max);
    const float mean = s.all / float(a.vocab);
    return a.spread != 0.0f ? (1.0f - a.spread) * plain + a.spread * (log_sum - (mean - s.max)) : plain;
}

// Statistics of the block's row, in every thread.
template <class T>
__device__ __forceinline__ RowStats row_stats(const T* row, i32 present, i32 label, bool with_sum) {
    __shared__ float shared[32];
    __shared__ double shared_all[32];
    RowStats s;
    s.label = label >= 0 && label < present ? to_f32(row[label]) : 0.0f;
    const Running<T> seen = statistics(row, present, with_sum);
    s.max = block_max(seen.max, shared);
    // A thread that has seen nothing, or only −∞, has the sum 0; NaN propagates.
    const float own = seen.max == s.max ? seen.sum : seen.sum * exponential<T>(seen.max - s.max);
    s.sum = block_sum(own, shared);
    s.all = with_sum ? float(block_sum(seen.all, shared_all)) : 0.0f;
    return s;
}

template <class T, bool GRADIENT> __device__ __forceinline__ void cross_entropy(const LossArgs& a) {
    const i64 r = blockIdx.x;
    T* row = reinterpret_cast<T*>(a.logits) + r * a.stride;
    float* loss = reinterpret_cast<float*>(a.loss) + r;
    const i32 label = reinterpret_cast<const i32*>(a.labels)[r];
    if (label < 0 || label >= a.vocab) {
        if (threadIdx.x == 0) {
            if (label != IGNORE) fault(a.fault, FAULT_LABEL);
            *loss = 0.0f;
        }
        if (GRADIENT) fill_zero(row, a.width);
        return;
    }
    const RowStats s = row_stats(row, a.vocab, label, a.spread != 0.0f);
    if (threadIdx.x == 0) *loss = loss_of(a, s);
    if (GRADIENT) gradient(a, a.vocab, row, label, s.max, 1.0f / s.sum, reinterpret_cast<const float*>(a.weights)[r]);
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
        s = row_stats(reinterpret_cast<const T*>(a.logits) + r * a.stride, a.present, label - a.first, true);
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
    gradient(a, a.present, row, label - a.first, s.max, 1.0f / s.sum, w);
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
    extern "C" __global__ void __launch_bounds__(512, 2) cross_entropy_gradient_##NAME(const LossArgs a) {        \
        cross_entropy<T, true>(a);                                                                                \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(512, 2) cross_entropy_stats_##NAME(const VocabParallelArgs a) {          \
        shard_stats<T>(a);                                                                                        \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(512, 2) vocab_parallel_cross_entropy_##NAME(const VocabParallelArgs a) {          \
        shard_gradient<T>(a);                                                                                     \
    }

FOR_EACH_TYPE(KERNELS)
