//! The types of keys that are more than a number or a text.

use super::table::KeyType;
use crate::model::config::{Activation, NormKind};
use crate::model::moe::ScoreKind;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// A key with a fixed list of values.
macro_rules! choice {
    ($(#[doc = $doc:literal])+ $name:ident {
        $( $(#[doc = $variant_doc:literal])+ $variant:ident = $text:literal ),+ $(,)?
    }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum $name { $( $(#[doc = $variant_doc])+ #[serde(rename = $text)] $variant, )+ }

        impl $name {
            /// Every value.
            pub const ALL: &[$name] = &[$( $name::$variant ),+];

            /// The name in a recipe.
            pub const fn name(self) -> &'static str {
                match self { $( $name::$variant => $text, )+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;
            fn from_str(text: &str) -> Result<$name, String> {
                $name::ALL.iter().copied().find(|x| x.name() == text).ok_or_else(|| {
                    format!("expected {}, found \"{text}\"", <$name as KeyType>::expects())
                })
            }
        }

        impl KeyType for $name {
            fn expects() -> String {
                one_of(&[$( $text ),+])
            }
        }
    };
}

fn one_of(names: &[&str]) -> String {
    match names {
        [only] => format!("\"{only}\""),
        _ => format!("one of \"{}\"", names.join("\", \"")),
    }
}

choice! {
    /// The element type of weights and activations in compute.
    Precision {
        /// Single precision throughout.
        F32 = "f32",
        /// bf16 compute; master weights and gradient sums stay f32.
        Bf16 = "bf16",
        /// f16 compute under a loss scale; master weights and gradient sums stay f32.
        F16 = "f16",
    }
}

impl Precision {
    /// As tensors know it.
    pub const fn dtype(self) -> ferrotron_tensor::DType {
        match self {
            Precision::F32 => ferrotron_tensor::DType::F32,
            Precision::Bf16 => ferrotron_tensor::DType::BF16,
            Precision::F16 => ferrotron_tensor::DType::F16,
        }
    }
}

choice! {
    /// How factors of products are brought into eight bits or fewer.
    Scaling {
        /// Not at all.
        None = "none",
        /// FP8, one scale per tensor, from its own largest magnitude.
        Current = "current",
        /// FP8, one scale per tensor, from those of earlier steps.
        Delayed = "delayed",
        /// FP8, one scale per 128 values (activations, gradients) and per 128 x 128 (weights).
        Block = "block",
        /// FP8, one power of two per 32 values; emulated.
        Mxfp8 = "mxfp8",
        /// Four bits, one scale per 16 values; emulated.
        Nvfp4 = "nvfp4",
    }
}

choice! {
    /// The type of a router's logits.
    RouterType {
        /// That of the model.
        Model = "model",
        /// f32.
        F32 = "f32",
        /// f64 sums.
        F64 = "f64",
    }
}

choice! {
    /// Which tokens stay within an expert's capacity.
    Keep {
        /// Those whose choice is most probable.
        Probable = "probable",
        /// The first.
        First = "first",
    }
}

choice! {
    /// How tokens come to experts of other ranks.
    Dispatch {
        /// Each rank gets the tokens of its experts.
        AllToAll = "all_to_all",
        /// Each rank gets all tokens.
        AllGather = "all_gather",
    }
}

choice! {
    /// What may be in eight bits besides the linear maps of layers.
    Beside {
        /// The output matrix, as precision.scaling says.
        Head = "head",
        /// Forward attention.
        Attention = "attention",
    }
}

/// A list of [`Beside`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Also(pub Vec<Beside>);

impl Also {
    /// Is this one of them?
    pub fn has(&self, which: Beside) -> bool {
        self.0.contains(&which)
    }
}

impl<'de> Deserialize<'de> for Also {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let list = OneOrMany::deserialize(d)?.0;
        list.iter().map(|x| x.parse().map_err(D::Error::custom)).collect::<Result<_, _>>().map(Also)
    }
}

impl KeyType for Also {
    fn expects() -> String {
        format!("{} or a list of them", Beside::expects())
    }
}

choice! {
    /// What weights of 8-bit products are between steps.
    Weights {
        /// Numbers in precision.dtype.
        Bf16 = "bf16",
        /// Bytes and their scale, nothing else.
        Fp8 = "fp8",
    }
}

choice! {
    /// Which of the two 8-bit formats is used where.
    Format {
        /// Gradients in E5M2, everything else in E4M3.
        Hybrid = "hybrid",
        /// Everything in E4M3.
        E4m3 = "e4m3",
    }
}

choice! {
    /// How the f32 weights that the optimizer works on are kept.
    Master {
        /// As they are, beside the weights the model computes with: 4 bytes a parameter.
        F32 = "f32",
        /// As the 16 bits that a bf16 weight lacks: 2 bytes a parameter, the same f32 together. The weight is then the
        /// f32 rounded half away from zero, not half to even.
        Remainder = "remainder",
    }
}

choice! {
    /// How the optimizer's moments are kept; its arithmetic is f32.
    Moments {
        /// Single precision.
        F32 = "f32",
        /// bf16, rounded to nearest.
        Bf16 = "bf16",
        /// f16 with a scale for each 32 elements, rounded at random but reproducibly.
        F16 = "f16",
        /// 8 bits with a scale for each 32 elements, rounded at random but reproducibly.
        Fp8 = "fp8",
    }
}

impl Moments {
    /// As tensors know it.
    pub const fn dtype(self) -> ferrotron_tensor::DType {
        match self {
            Moments::F32 => ferrotron_tensor::DType::F32,
            Moments::Bf16 => ferrotron_tensor::DType::BF16,
            Moments::F16 => ferrotron_tensor::DType::F16,
            Moments::Fp8 => ferrotron_tensor::DType::U8,
        }
    }

    /// Bytes of an element, scales included.
    pub fn bytes(self) -> f64 {
        let scales = match self {
            Moments::F32 | Moments::Bf16 => 0.0,
            Moments::F16 | Moments::Fp8 => 1.0 / ferrotron_kernels::moments::BLOCK as f64,
        };
        self.dtype().size() as f64 + scales
    }
}

choice! {
    /// The update rule.
    OptimizerKind {
        /// Adam with decoupled weight decay.
        AdamW = "adamw",
        /// Adam with weight decay added to the gradient.
        Adam = "adam",
        /// Gradient descent with momentum.
        Sgd = "sgd",
    }
}

choice! {
    /// How the learning rate falls after warm-up.
    Decay {
        /// It does not.
        Constant = "constant",
        /// In a straight line to `min_lr`.
        Linear = "linear",
        /// Along half a cosine to `min_lr`.
        Cosine = "cosine",
        /// As one over the square root of the step.
        InverseSqrt = "inverse_sqrt",
        /// Warm-up, stable, decay: constant, then down over the last `wsd_steps`.
        Wsd = "wsd",
    }
}

choice! {
    /// Whether whole steps are captured once and replayed.
    Graph {
        /// Where that is possible and pays.
        Auto = "auto",
        /// Always; refused where it is not possible.
        On = "on",
        /// Never.
        Off = "off",
    }
}

choice! {
    /// The order of work in a pipeline.
    PipelineOrder {
        /// One forward, one backward in turn; interleaved where a rank has several chunks of layers.
        OneForwardOneBackward = "1f1b",
        /// The same, with weight gradients put off to where a rank would wait.
        ZeroBubble = "zero-bubble",
        /// A forward and a backward of different micro-batches in turns: what one sends to experts travels while the other
        /// computes. More micro-batches are in memory at a time; the results are the same bits.
        Paired = "paired",
    }
}

choice! {
    /// The shape of the last part of a warm-up, stable, decay schedule.
    WsdStyle {
        /// 1 − x
        Linear = "linear",
        /// (1 + cos πx) / 2
        Cosine = "cosine",
        /// 2 · 0.5^x − 1
        Exponential = "exponential",
        /// 1 − √x
        MinusSqrt = "minus_sqrt",
    }
}

choice! {
    /// How weight decay goes from `weight_decay` to `weight_decay_end`.
    WeightDecayStyle {
        /// It stays.
        Constant = "constant",
        /// In a straight line.
        Linear = "linear",
        /// Along half a cosine.
        Cosine = "cosine",
    }
}

choice! {
    /// How positions enter the model.
    PositionKind {
        /// A learned vector per position.
        Learned = "learned",
        /// Rotary embedding of q and k.
        Rope = "rope",
    }
}

choice! {
    /// A part of a layer that recomputation can drop and run again in the backward pass.
    Module {
        /// The norms.
        Norm = "norm",
        /// The attention core: scores, softmax, weighted sum.
        Attention = "attention",
        /// The MLP's non-linearity.
        Activation = "activation",
        /// The whole MLP.
        Mlp = "mlp",
    }
}

impl KeyType for Activation {
    fn expects() -> String {
        one_of(&["silu", "gelu_tanh", "gelu_erf"])
    }
}

impl KeyType for ScoreKind {
    fn expects() -> String {
        one_of(&["softmax", "sigmoid", "sqrt_softplus"])
    }
}

impl KeyType for NormKind {
    fn expects() -> String {
        one_of(&["rmsnorm", "layernorm"])
    }
}

/// What the forward pass drops and the backward pass computes again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    None,
    /// Every layer keeps its input only.
    Full,
    /// These parts of every layer.
    Modules(Vec<Module>),
}

impl Serialize for Recompute {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Recompute::None => s.serialize_str("none"),
            Recompute::Full => s.serialize_str("full"),
            Recompute::Modules(list) => list.serialize(s),
        }
    }
}

impl<'de> Deserialize<'de> for Recompute {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        match OneOrMany::deserialize(d)?.0.as_slice() {
            [] => Ok(Recompute::None),
            [one] if one == "none" => Ok(Recompute::None),
            [one] if one == "full" => Ok(Recompute::Full),
            many => many
                .iter()
                .map(|m| m.parse().map_err(D::Error::custom))
                .collect::<Result<_, _>>()
                .map(Recompute::Modules),
        }
    }
}

impl KeyType for Recompute {
    fn expects() -> String {
        format!(
            "\"none\", \"full\" or a list of \"{}\"",
            Module::ALL.iter().map(|m| m.name()).collect::<Vec<_>>().join("\", \"")
        )
    }
}

/// A list of texts that may be written as one text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OneOrMany(pub Vec<String>);

impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            One(String),
            Many(Vec<String>),
        }
        Ok(OneOrMany(match Form::deserialize(d)? {
            Form::One(text) => vec![text],
            Form::Many(list) => list,
        }))
    }
}

impl KeyType for OneOrMany {
    fn expects() -> String {
        "text or a list of texts".into()
    }
}

/// A large count: `20_000_000_000`, `2e10` or `"20B"` (K, M, B, T are powers of a thousand).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Count(pub u64);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Whole(u64),
            Real(f64),
            Text(String),
        }
        let (x, unit) = match Form::deserialize(d)? {
            Form::Whole(n) => return Ok(Count(n)),
            Form::Real(x) => (x, 1.0),
            Form::Text(text) => {
                let text = text.trim().replace('_', "");
                let (digits, unit) = match text.char_indices().next_back() {
                    Some((i, 'K' | 'k')) => (&text[..i], 1e3),
                    Some((i, 'M' | 'm')) => (&text[..i], 1e6),
                    Some((i, 'B' | 'b')) => (&text[..i], 1e9),
                    Some((i, 'T' | 't')) => (&text[..i], 1e12),
                    _ => (text.as_str(), 1.0),
                };
                (digits.trim().parse::<f64>().map_err(D::Error::custom)?, unit)
            }
        };
        let value = x * unit;
        // Above 2^53 a float no longer holds every whole number.
        if value.fract() != 0.0 || !(0.0..=9_007_199_254_740_992.0).contains(&value) {
            return Err(D::Error::custom("not a whole number"));
        }
        Ok(Count(value as u64))
    }
}

impl KeyType for Count {
    fn expects() -> String {
        "a whole number such as 20000000, 2e7 or \"20M\"".into()
    }
}

/// Shares of training, validation and test data; any scale. Written as a list or as `"99,1,0"`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Split(pub [f64; 3]);

impl<'de> Deserialize<'de> for Split {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            List(Vec<f64>),
            Text(String),
        }
        let list = match Form::deserialize(d)? {
            Form::List(list) => list,
            Form::Text(text) => text
                .split([',', '/'])
                .map(|part| part.trim().parse::<f64>().map_err(D::Error::custom))
                .collect::<Result<_, _>>()?,
        };
        if list.is_empty() || list.len() > 3 || list.iter().any(|x| !x.is_finite()) {
            return Err(D::Error::custom("up to three shares"));
        }
        Ok(Split(std::array::from_fn(|i| list.get(i).copied().unwrap_or(0.0))))
    }
}

impl KeyType for Split {
    fn expects() -> String {
        "shares of training, validation and test data such as [99, 1, 0]".into()
    }
}
