//! RoPE frequencies and their cosine and sine tables.
//!
//! Computed in f64 with `libm`, so that every machine gets the same bits, and rounded where the reference implementations
//! round: frequencies to f32, and the angle `position · frequency` in f32.

use ferrotron_tensor::{Result, shape_error};
use serde::{Deserialize, Serialize};

/// RoPE scaling for long contexts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Linear position interpolation: positions divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3: low frequencies divided by `factor`, with a smooth transition to the unscaled high frequencies.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Low-frequency bound.
        low_freq_factor: f64,
        /// High-frequency bound.
        high_freq_factor: f64,
        /// Context length of pretraining.
        original_max_positions: usize,
    },
    /// YaRN: a ramp between interpolation and extrapolation, and a factor on cos and sin.
    Yarn {
        /// The divisor of interpolated dimensions.
        factor: f64,
        /// Context length of pretraining.
        original_max_positions: usize,
        /// Rotations above which a dimension is not interpolated (beta_fast).
        beta_fast: f64,
        /// Rotations below which a dimension is fully interpolated (beta_slow).
        beta_slow: f64,
        /// Scale in the attention factor's numerator.
        mscale: f64,
        /// Scale in its denominator; 0 means no denominator.
        mscale_all_dim: f64,
        /// Round the ends of the ramp to integer dimensions.
        truncate: bool,
        /// Explicit factor on cos and sin, instead of the derived one.
        attention_factor: Option<f64>,
    },
    /// LongRoPE (Phi-3): a divisor for each frequency, one set for sequences of the pretraining context and one for longer
    /// ones, and a factor on cos and sin.
    LongRope {
        /// Divisors for sequences of up to `original_max_positions` tokens.
        short_factor: Vec<f64>,
        /// Divisors for longer sequences.
        long_factor: Vec<f64>,
        /// Context length of pretraining.
        original_max_positions: usize,
        /// How much longer the context is than in pretraining, for the factor on cos and sin.
        factor: f64,
        /// Explicit factor on cos and sin, instead of the derived one.
        attention_factor: Option<f64>,
    },
}

impl RopeScaling {
    /// Factor on cos and sin: 1, except for YaRN and LongRoPE, which has `√(1 + ln factor / ln context)`.
    pub fn attention_scaling(&self) -> f64 {
        match *self {
            RopeScaling::Yarn { attention_factor: Some(given), .. } => given,
            RopeScaling::Yarn { factor, mscale, mscale_all_dim, .. } => {
                yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
            }
            RopeScaling::LongRope { attention_factor: Some(given), .. } => given,
            RopeScaling::LongRope { factor, original_max_positions, .. } if factor > 1.0 => {
                libm::sqrt(1.0 + libm::log(factor) / libm::log(original_max_positions as f64))
            }
            _ => 1.0,
        }
    }
}

/// YaRN's attention factor for a context extended by `factor`: `0.1·mscale·ln(factor) + 1`, or 1 for a factor of at most 1.
pub fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * libm::log(factor) + 1.0 }
}

/// Angle per position of each pair of channels: `rotary_dim / 2` frequencies, `θ^(−2i/rotary_dim)` before
/// scaling. `positions` is the longest sequence, by which LongRoPE chooses its factors.
pub fn inv_freq(theta: f64, rotary_dim: usize, scaling: &RopeScaling, positions: usize) -> Result<Vec<f32>> {
    if !(rotary_dim.is_multiple_of(2) && theta > 0.0 && theta.is_finite()) {
        return shape_error(
            "rope",
            format!("needs an even number of rotated channels and theta > 0, not {rotary_dim} and {theta}"),
        );
    }
    let dim = rotary_dim as f64;
    let plain = (0..rotary_dim / 2).map(|i| libm::pow(theta, -2.0 * i as f64 / dim));
    Ok(match *scaling {
        RopeScaling::None => plain.map(|f| f as f32).collect(),
        RopeScaling::Linear { factor } => plain.map(|f| (f / factor) as f32).collect(),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
            let context = original_max_positions as f64;
            let stretch = |f: f64| {
                // Rotations of this pair over the pretraining context.
                let turns = context * f / std::f64::consts::TAU;
                let smooth =
                    ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                (1.0 - smooth) * f / factor + smooth * f
            };
            plain.map(|f| stretch(f) as f32).collect()
        }
        RopeScaling::Yarn { factor, original_max_positions, beta_fast, beta_slow, truncate, .. } => {
            // The (fractional) dimension that makes `rotations` rotations over the pretraining context.
            let dimension = |rotations: f64| {
                let ratio = original_max_positions as f64 / (rotations * std::f64::consts::TAU);
                dim * libm::log(ratio) / (2.0 * libm::log(theta))
            };
            let (mut low, mut high) = (dimension(beta_fast), dimension(beta_slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
            if low == high {
                high += 0.001;
            }
            plain
                .enumerate()
                .map(|(i, f)| {
                    let interpolated = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    (f / factor * interpolated + f * (1.0 - interpolated)) as f32
                })
                .collect()
        }
        RopeScaling::LongRope { ref short_factor, ref long_factor, original_max_positions, .. } => {
            let factors = if positions > original_max_positions { long_factor } else { short_factor };
            if factors.len() != rotary_dim / 2 {
                let what = format!("{} factors for {} frequencies", factors.len(), rotary_dim / 2);
                return shape_error("rope", what);
            }
            // In f32, as the reference divides.
            let divide = |(f, by): (f64, &f64)| 1.0 / (*by as f32 * (1.0 / f) as f32);
            plain.zip(factors).map(divide).collect()
        }
    })
}

/// Cosines and sines of `positions` positions, each f32 `[positions, rotary_dim / 2]`, times the attention
/// factor of the scaling.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTables {
    /// `[positions, half]`
    pub cos: Vec<f32>,
    /// `[positions, half]`
    pub sin: Vec<f32>,
    /// Pairs of channels that are rotated.
    pub half: usize,
}

impl RopeTables {
    /// Tables for positions `0..positions`.
    pub fn new(theta: f64, rotary_dim: usize, scaling: &RopeScaling, positions: usize) -> Result<RopeTables> {
        let frequencies = inv_freq(theta, rotary_dim, scaling, positions)?;
        Ok(RopeTables::from_frequencies(&frequencies, scaling.attention_scaling(), positions))
    }

    /// Tables from given frequencies.
    pub fn from_frequencies(frequencies: &[f32], attention_scaling: f64, positions: usize) -> RopeTables {
        let half = frequencies.len();
        let mut tables = RopeTables {
            cos: Vec::with_capacity(positions * half),
            sin: Vec::with_capacity(positions * half),
            half,
        };
        for position in 0..positions {
            for f in frequencies {
                let angle = f64::from(position as f32 * f);
                let (sin, cos) = libm::sincos(angle);
                tables.cos.push((cos * attention_scaling) as f32);
                tables.sin.push((sin * attention_scaling) as f32);
            }
        }
        tables
    }
}
