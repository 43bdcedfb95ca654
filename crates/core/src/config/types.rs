//! Types of configuration values: enumerations, and values with several spellings.

mod architecture;
mod data;
mod groups;
mod muon;
mod offload;
mod precision;
mod training;
mod written;

pub use architecture::{DispatcherType, DropPolicy, PositionKind, RouterPrecision};
pub use data::{DataFormat, Truncation};
pub use groups::{ParamGroup, ParamGroupList};
pub use muon::{
    MuonAdaptive, MuonCoefficients, MuonDecay, MuonProducts, MuonScale, MuonSettings, MuonTpMode,
};
pub use offload::{OffloadModule, OffloadedActivations, OffloadedState, OptimizerCompute};
pub use precision::{Fp8Format, MasterDtype, Precision, QuantRecipe, StateDtype};
pub use training::{
    BadStepPolicy, CudaGraphMode, Decay, FsdpOuter, OptimizerKind, Packing, PipelineSchedule, Recompute,
    RecomputeModule, SaveFailurePolicy, WeightDecayStyle, WsdStyle,
};
pub use written::{ByteCount, Count, DataSplit, OneOrMany, TimeSpan};

/// Declares an enumeration with the spelling of each value.
macro_rules! choice {
    ($(#[doc = $doc:literal])+ $name:ident {
        $( $(#[doc = $variant_doc:literal])+ $variant:ident = $text:literal ),+ $(,)?
    }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
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
                    format!("expected {}, found \"{text}\"", <$name as $crate::config::KeyType>::expects())
                })
            }
        }

        impl $crate::config::KeyType for $name {
            fn expects() -> String {
                $crate::config::types::one_of(&[$( $text ),+])
            }
        }
    };
}
use choice;

fn one_of(names: &[&str]) -> String {
    match names {
        [only] => format!("\"{only}\""),
        _ => format!("one of \"{}\"", names.join("\", \"")),
    }
}
