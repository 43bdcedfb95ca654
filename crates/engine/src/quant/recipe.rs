//! Low-precision recipes as values: how operands of products are narrowed, and which products are.

use ferrotron_kernels::{DelayedScaling, ScalingMode};
use ferrotron_tensor::DType;

/// Where scales come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Method {
    /// One scale per tensor, from its own largest magnitude.
    Current,
    /// One scale per tensor, from the largest magnitudes of earlier steps.
    Delayed {
        /// How a step ends.
        update: DelayedScaling,
        /// Steps that are remembered.
        history: usize,
    },
    /// One scale per 128 values of activations and gradients, per 128 x 128 of weights.
    Block,
    /// One power of two per 32 values; emulated in bf16.
    Mxfp8,
    /// Four bits, one FP8 scale per 16 values and one f32 per tensor; emulated in bf16.
    Nvfp4,
}

/// How operands of products are narrowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// Where scales come from.
    pub method: Method,
    /// Gradients in E5M2 (everything else in E4M3).
    pub hybrid: bool,
    /// Scales are powers of two.
    pub pow2: bool,
}

/// What an operand is, which decides its format and who shares a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Input of a map.
    Input,
    /// Its weight.
    Weight,
    /// Gradient of its output.
    Gradient,
}

impl Role {
    /// Operands of a map, in the order in which their scales are kept.
    pub const ALL: [Role; 3] = [Role::Input, Role::Weight, Role::Gradient];
}

impl Recipe {
    /// The format of an operand.
    pub fn format(&self, role: Role) -> DType {
        if self.hybrid && role == Role::Gradient { DType::E5M2 } else { DType::E4M3 }
    }

    /// Which values of an operand share a scale.
    pub fn scaling(&self, role: Role) -> ScalingMode {
        match (self.method, role) {
            (Method::Block, Role::Weight) => ScalingMode::Block128x128,
            (Method::Block, _) => ScalingMode::Block1x128,
            _ => ScalingMode::PerTensor,
        }
    }

    /// Is it computed in bf16 on rounded values?
    pub fn emulated(&self) -> bool {
        matches!(self.method, Method::Mxfp8 | Method::Nvfp4)
    }

    /// Is an operand rounded up or down at random?
    pub fn random(&self, role: Role) -> bool {
        self.method == Method::Nvfp4 && role == Role::Gradient
    }

    /// Does one scale hold for a whole tensor, so that ranks which share the tensor must agree on it?
    pub fn per_tensor(&self) -> bool {
        matches!(self.method, Method::Current | Method::Delayed { .. })
    }

    /// Do 128 values along a row share a scale, so that a rank narrows its rows as all of them would be?
    pub fn per_block(&self) -> bool {
        self.method == Method::Block
    }

    /// Is the largest magnitude of an operand needed before it is narrowed?
    pub fn measures(&self) -> bool {
        self.method == Method::Current
    }

    /// May the matrix unit keep sums short in the forward product?
    pub fn fast_forward(&self) -> bool {
        self.per_tensor()
    }
}

/// One of the three products of a linear map.
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

/// A recipe for one map: which of its products it holds for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearQuant {
    /// How operands are narrowed.
    pub recipe: Recipe,
    /// `y = x·Wᵀ`
    pub fprop: bool,
    /// `dx = dy·W`
    pub dgrad: bool,
    /// `dW = dyᵀ·x`
    pub wgrad: bool,
    /// The weight is bytes between steps, too: both products that it is in are narrow.
    pub fp8_resident: bool,
}

/// Where a recipe does not hold: a module by consecutive parts of its name (`mlp.down`, `layers.3`), or one product of
/// it (`mlp.down:weight_grad`).
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
                    format!("'{name}' is not a product; after the colon stands one of {all}")
                })?;
                (path, Some(product))
            }
        };
        let parts: Vec<String> = path.split('.').map(str::to_string).collect();
        if parts.iter().any(String::is_empty) {
            return Err(format!("'{text}' does not name a module; write such as mlp.down or layers.3"));
        }
        Ok(Exception { parts, product })
    }
}

impl Exception {
    fn covers(&self, module: &str) -> bool {
        let parts: Vec<&str> = module.split('.').collect();
        parts.windows(self.parts.len()).any(|w| w.iter().zip(&self.parts).all(|(a, b)| a == b))
    }
}

/// Which products of a model are narrowed, and how.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Policy {
    /// Nothing is, without one.
    pub recipe: Option<Recipe>,
    /// Layers of the model.
    pub layers: usize,
    /// Layers at its start that are left alone.
    pub first: usize,
    /// Layers at its end that are left alone; with any, those that predict further tokens are too.
    pub last: usize,
    /// What else is.
    pub except: Vec<Exception>,
    /// The output matrix is narrow, too: the map to `head`.
    pub head: bool,
    /// Forward attention has q, k, v and the weights of values in E4M3, whatever the recipe.
    pub attention: bool,
    /// Weights that are in narrow products alone are bytes between steps, too.
    pub fp8_resident: bool,
}

impl Policy {
    /// What holds for a map with these (stacked) logical outputs, such as `layers.3.attn.q` or `head`.
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

    /// Is forward attention of a module, such as `layers.3.attn`, in quant bits? In exceptions it is `layers.3.attn.scores`.
    pub fn quantizes_attention(&self, name: &str) -> bool {
        let scores = format!("{name}.scores");
        let excepted = |e: &Exception| e.product.is_none() && e.covers(&scores);
        self.attention && self.has_layer_of(name) && !self.except.iter().any(excepted)
    }

    /// Is a module in a layer that is not left alone?
    fn has_layer_of(&self, name: &str) -> bool {
        let number = |rest: &str| rest.split('.').next().and_then(|n| n.parse::<usize>().ok());
        match (name.strip_prefix("layers."), name.strip_prefix("mtp.")) {
            (Some(rest), _) => number(rest).is_some_and(|i| i >= self.first && i + self.last < self.layers),
            // Layers that predict further tokens come after the last.
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
        // One of several stacked outputs is enough: they are one product.
        let qkv = p.of(&["layers.1.attn.q", "layers.1.attn.k", "layers.1.attn.v"]).unwrap();
        assert_eq!((qkv.fprop, qkv.dgrad, qkv.wgrad), (true, true, false));
        // Parts, not letters.
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
