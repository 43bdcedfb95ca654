//! Quantization recipes as values, and the policy that says which GEMMs they apply to.

use ferrotron_kernels::{DelayedScaling, ScalingMode};
use ferrotron_tensor::DType;

/// Scaling of a recipe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Method {
    /// One scale per tensor, from its own amax.
    Current,
    /// One scale per tensor, from the amax history of earlier steps.
    Delayed {
        /// How the scale follows from the history.
        update: DelayedScaling,
        /// Length of the amax history in steps.
        history: usize,
    },
    /// One scale per 1×128 block of activations and gradients, per 128×128 block of weights.
    Block,
    /// MXFP8: a power-of-two scale per 32 values; emulated in bf16 where the device does not multiply it.
    Mxfp8,
    /// NVFP4: an FP8 scale per 16 values and an f32 scale per tensor; emulated in bf16 where the device does not multiply it.
    Nvfp4,
}

/// How GEMM operands are quantized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// Scaling.
    pub method: Method,
    /// Gradients in E5M2, everything else in E4M3.
    pub hybrid: bool,
    /// Round scales to powers of two.
    pub pow2: bool,
}

/// Role of an operand, which decides its format and scaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Input of a linear.
    Input,
    /// Weight.
    Weight,
    /// Gradient of the output.
    Gradient,
}

impl Role {
    /// The operands of a linear, in the order in which their scales are stored.
    pub const ALL: [Role; 3] = [Role::Input, Role::Weight, Role::Gradient];
}

impl Recipe {
    /// FP8 format of an operand.
    pub fn format(&self, role: Role) -> DType {
        if self.hybrid && role == Role::Gradient { DType::E5M2 } else { DType::E4M3 }
    }

    /// Granularity of an operand's scales.
    pub fn scaling(&self, role: Role) -> ScalingMode {
        match (self.method, role) {
            (Method::Block, Role::Weight) => ScalingMode::Block128x128,
            (Method::Block, _) => ScalingMode::Block1x128,
            _ => ScalingMode::PerTensor,
        }
    }

    /// Whether it is a microscaling format: emulated in bf16 on rounded values, except on GPUs that multiply it.
    pub fn emulated(&self) -> bool {
        matches!(self.method, Method::Mxfp8 | Method::Nvfp4)
    }

    /// Whether an operand is rounded stochastically.
    pub fn random(&self, role: Role) -> bool {
        self.method == Method::Nvfp4 && role == Role::Gradient
    }

    /// Whether one scale covers a whole tensor, so that its amax must be all-reduced over the ranks that share it.
    pub fn per_tensor(&self) -> bool {
        matches!(self.method, Method::Current | Method::Delayed { .. })
    }

    /// Whether 1×128 blocks share a scale, so that each rank can quantize its own rows.
    pub fn per_block(&self) -> bool {
        self.method == Method::Block
    }

    /// Whether the amax of an operand is needed before it is quantized.
    pub fn measures(&self) -> bool {
        self.method == Method::Current
    }

    /// Whether fprop may use fast FP8 accumulation.
    pub fn fast_forward(&self) -> bool {
        self.per_tensor()
    }
}

/// One of the three GEMMs of a linear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearGemm {
    /// `y = x·Wᵀ`
    Fprop,
    /// `dx = dy·W`
    Dgrad,
    /// `dW = dyᵀ·x`
    Wgrad,
}

impl LinearGemm {
    /// Its name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            LinearGemm::Fprop => "output",
            LinearGemm::Dgrad => "input_grad",
            LinearGemm::Wgrad => "weight_grad",
        }
    }

    const ALL: [LinearGemm; 3] = [LinearGemm::Fprop, LinearGemm::Dgrad, LinearGemm::Wgrad];
}

/// Quantization of one linear: a recipe, and the GEMMs it applies to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearQuant {
    /// The recipe.
    pub recipe: Recipe,
    /// `y = x·Wᵀ`
    pub fprop: bool,
    /// `dx = dy·W`
    pub dgrad: bool,
    /// `dW = dyᵀ·x`
    pub wgrad: bool,
    /// The weight is FP8-resident; it is used by FP8 GEMMs only.
    pub fp8_resident: bool,
}

/// An exception to the policy: a module by consecutive parts of its name (`mlp.down`, `layers.3`), or one GEMM of it
/// (`mlp.down:weight_grad`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exception {
    parts: Vec<String>,
    product: Option<LinearGemm>,
}

impl std::str::FromStr for Exception {
    type Err = String;
    fn from_str(text: &str) -> Result<Exception, String> {
        let (path, product) = match text.split_once(':') {
            None => (text, None),
            Some((path, name)) => {
                let found = LinearGemm::ALL.into_iter().find(|p| p.name() == name);
                let product = found.ok_or_else(|| {
                    let all = LinearGemm::ALL.map(LinearGemm::name).join(", ");
                    format!("'{name}' is not a GEMM; use one of {all} after the colon")
                })?;
                (path, Some(product))
            }
        };
        let parts: Vec<String> = path.split('.').map(str::to_string).collect();
        if parts.iter().any(String::is_empty) {
            return Err(format!("'{text}' does not name a module; examples: mlp.down, layers.3"));
        }
        Ok(Exception { parts, product })
    }
}

impl std::fmt::Display for Exception {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}", self.parts.join("."))?;
        self.product.map_or(Ok(()), |product| write!(f, ":{}", product.name()))
    }
}

impl Exception {
    /// Whether it names a module, such as `layers.3.mlp.down`.
    pub fn covers(&self, module: &str) -> bool {
        let parts: Vec<&str> = module.split('.').collect();
        parts.windows(self.parts.len()).any(|w| w.iter().zip(&self.parts).all(|(a, b)| a == b))
    }
}

/// Which GEMMs of a model are quantized, and how.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Policy {
    /// The recipe; None quantizes nothing.
    pub recipe: Option<Recipe>,
    /// Number of decoder layers.
    pub layers: usize,
    /// Decoder layers at the start that stay in bf16.
    pub first: usize,
    /// Decoder layers at the end that stay in bf16; with any, MTP layers do too.
    pub last: usize,
    /// Further exceptions.
    pub except: Vec<Exception>,
    /// Also quantize the LM head, named `head`.
    pub head: bool,
    /// Forward attention in E4M3 (q, k, v and softmax probabilities), whatever the recipe.
    pub attention: bool,
    /// Keep weights that only FP8 GEMMs use FP8-resident.
    pub fp8_resident: bool,
}

impl Policy {
    /// Quantization of a linear with these (stacked) logical outputs, such as `layers.3.attn.q` or `head`.
    pub fn of(&self, outputs: &[&str]) -> Option<LinearQuant> {
        let recipe = self.recipe?;
        let first = *outputs.first()?;
        let narrow = if first == "head" { self.head } else { self.has_layer_of(first) };
        if !narrow {
            return None;
        }
        let covers = |product| {
            let hit = |e: &&Exception| {
                e.product.is_none_or(|p| p == product) && outputs.iter().any(|o| e.covers(o))
            };
            !self.except.iter().any(|e| hit(&e))
        };
        let [fprop, dgrad, wgrad] = LinearGemm::ALL.map(covers);
        let fp8_resident = self.fp8_resident && fprop && dgrad;
        (fprop || dgrad || wgrad).then_some(LinearQuant { recipe, fprop, dgrad, wgrad, fp8_resident })
    }

    /// Whether forward attention of a module, such as `layers.3.attn`, is in FP8; exceptions call it
    /// `layers.3.attn.scores`.
    pub fn quantizes_attention(&self, name: &str) -> bool {
        let scores = format!("{name}.scores");
        let excepted = |e: &Exception| e.product.is_none() && e.covers(&scores);
        self.attention && self.has_layer_of(name) && !self.except.iter().any(excepted)
    }

    /// Whether a module is in a layer that the policy quantizes.
    fn has_layer_of(&self, name: &str) -> bool {
        let number = |rest: &str| rest.split('.').next().and_then(|n| n.parse::<usize>().ok());
        match (name.strip_prefix("layers."), name.strip_prefix("mtp.")) {
            (Some(rest), _) => number(rest).is_some_and(|i| i >= self.first && i + self.last < self.layers),
            // MTP layers come after the last decoder layer.
            (_, Some(_)) => self.last == 0,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(except: &[&str]) -> Policy {
        let recipe = Recipe { method: Method::Current, hybrid: true, pow2: false };
        let except = except.iter().map(|e| e.parse().unwrap()).collect();
        Policy { recipe: Some(recipe), layers: 6, first: 1, last: 2, except, ..Policy::default() }
    }

    #[test]
    fn layers_at_both_ends_and_everything_outside_layers_are_left_alone() {
        let p = policy(&[]);
        let all: Vec<bool> = (0..6).map(|i| p.of(&[&format!("layers.{i}.mlp.down")]).is_some()).collect();
        assert_eq!(all, [false, true, true, true, false, false]);
        assert_eq!(p.of(&["head"]), None);
        let with_head = Policy { head: true, ..policy(&["head:weight_grad"]) };
        let e = with_head.of(&["head"]).unwrap();
        assert_eq!((e.fprop, e.dgrad, e.wgrad), (true, true, false));
        assert_eq!(with_head.of(&["embed.tokens"]), None);
        let attention = Policy { attention: true, recipe: None, ..policy(&["layers.3", "mlp:output"]) };
        let all: Vec<bool> =
            (0..6).map(|i| attention.quantizes_attention(&format!("layers.{i}.attn"))).collect();
        assert_eq!(all, [false, true, true, false, false, false]);
        let excepted = Policy { attention: true, last: 0, ..policy(&["layers.2.attn.scores", "attn.q"]) };
        let of = |name: &str| excepted.quantizes_attention(name);
        assert_eq!(["layers.2.attn", "layers.3.attn", "mtp.0.layer.attn"].map(of), [false, true, true]);
        assert!(!p.quantizes_attention("layers.2.attn"));
        assert_eq!(p.of(&["mtp.0.layer.mlp.down"]), None);
        let none_last = Policy { last: 0, ..policy(&["mtp.1", "mlp.up"]) };
        let of = |name: &str| none_last.of(&[name]).is_some();
        assert_eq!(
            ["mtp.0.layer.mlp.down", "mtp.1.layer.mlp.down", "mtp.0.layer.mlp.up"].map(of),
            [true, false, false]
        );
        assert_eq!(Policy::default().of(&["layers.3.mlp.down"]), None);
    }

    #[test]
    fn exceptions_name_modules_and_products() {
        let p = policy(&["mlp.down", "layers.2", "attn.k:weight_grad"]);
        assert_eq!(p.of(&["layers.1.mlp.down"]), None);
        assert_eq!(p.of(&["layers.2.mlp.up"]), None);
        assert!(p.of(&["layers.1.mlp.up"]).unwrap().wgrad);
        // One excepted output of several stacked ones is enough: they are one GEMM.
        let qkv = p.of(&["layers.1.attn.q", "layers.1.attn.k", "layers.1.attn.v"]).unwrap();
        assert_eq!((qkv.fprop, qkv.dgrad, qkv.wgrad), (true, true, false));
        // Names match by parts, not by characters.
        assert!(policy(&["layers.1"]).of(&["layers.12.mlp.up"]).is_none());
        assert!(Policy { layers: 20, ..policy(&["layers.1"]) }.of(&["layers.12.mlp.up"]).is_some());
        assert!("mlp.down:backwards".parse::<Exception>().is_err());
        assert!("mlp..down".parse::<Exception>().is_err());
    }

    #[test]
    fn formats_follow_the_role() {
        let hybrid = Recipe { method: Method::Current, hybrid: true, pow2: false };
        assert_eq!(Role::ALL.map(|r| hybrid.format(r)), [DType::E4M3, DType::E4M3, DType::E5M2]);
        let block = Recipe { method: Method::Block, hybrid: false, pow2: true };
        assert_eq!(
            Role::ALL.map(|r| block.scaling(r)),
            [ScalingMode::Block1x128, ScalingMode::Block128x128, ScalingMode::Block1x128]
        );
    }
}
