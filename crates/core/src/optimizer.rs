//! The optimizer: master weights, moments, and one step over all of them.

use crate::Result;
use ferrotron_comm::Reduce;
use ferrotron_engine::{GradBuffer, ParamId, Params, Rank, initial_share};
use ferrotron_kernels::cpu::grad_norm::clip_factor;
use ferrotron_kernels::{Adam, Sgd, Update, scalars};
use ferrotron_tensor::{Category, DType, Tensor};

/// The update rule and its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Adam or AdamW.
    Adam(Adam),
    /// SGD with momentum.
    Sgd(Sgd),
}

/// State of the optimizer. Weights that the model computes with in f32 are their own masters.
pub struct Optimizer {
    rule: Rule,
    masters: Vec<Tensor>,
    first: Vec<Tensor>,
    second: Vec<Tensor>,
    decays: Vec<bool>,
    scalars: Tensor,
    max_norm: Option<f32>,
    steps: u64,
}

/// What one step is told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepRates {
    /// Learning rate.
    pub lr: f64,
    /// Weight decay of matrices.
    pub weight_decay: f64,
}

impl Optimizer {
    /// Fresh state for `params`. Weights must be filled afterwards, by [`Optimizer::initialise`] or part by
    /// part through [`Optimizer::master`] and [`Optimizer::publish`].
    pub fn new(
        rank: &Rank,
        params: &Params,
        rule: Rule,
        moments: DType,
        max_norm: Option<f32>,
    ) -> Result<Optimizer> {
        let s = &rank.compute;
        let masters = params
            .values()
            .iter()
            .map(|w| match params.dtype() {
                DType::F32 => Ok(w.clone()),
                _ => Tensor::empty(s, w.shape(), DType::F32, Category::Optimizer),
            })
            .collect::<Result<_, _>>()?;
        let zeros = || {
            params
                .values()
                .iter()
                .map(|w| s.zeros(w.shape(), moments, Category::Optimizer))
                .collect::<Result<Vec<_>, _>>()
        };
        let second = if matches!(rule, Rule::Adam(_)) { zeros()? } else { Vec::new() };
        Ok(Optimizer {
            rule,
            masters,
            first: zeros()?,
            second,
            decays: params.specs().iter().map(|p| p.decays()).collect(),
            scalars: s.zeros(&[scalars::COUNT], DType::F32, Category::Optimizer)?,
            max_norm,
            steps: 0,
        })
    }

    /// Fills masters with their declared initial values and the model's weights from them.
    pub fn initialise(&self, rank: &Rank, params: &Params) -> Result<()> {
        for (i, spec) in params.specs().iter().enumerate() {
            let values: Vec<f32> = spec
                .held()
                .flat_map(|(part, cut, _)| initial_share(rank.device().threads(), rank.seed, part, cut))
                .collect();
            rank.compute.write_to(&self.masters[i], &values)?;
        }
        self.publish(rank, params)
    }

    /// Rounds every master into the model's weight.
    pub fn publish(&self, rank: &Rank, params: &Params) -> Result<()> {
        if params.dtype() != DType::F32 {
            for (master, weight) in self.masters.iter().zip(params.values()) {
                rank.kernels.copy(&rank.compute, master, weight)?;
            }
        }
        Ok(())
    }

    /// Master weights f32, in order of declaration.
    pub fn masters(&self) -> &[Tensor] {
        &self.masters
    }

    /// Moments by name, each in order of declaration.
    pub fn moments(&self) -> Vec<(&'static str, &[Tensor])> {
        match self.rule {
            Rule::Adam(_) => vec![("adam.m", &self.first), ("adam.v", &self.second)],
            Rule::Sgd(_) => vec![("sgd.momentum", &self.first)],
        }
    }

    /// Steps done.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Continues from `steps` steps.
    pub fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// One step with the gradients, summed over ranks; returns the global gradient norm before clipping.
    pub fn step(
        &mut self,
        rank: &Rank,
        params: &Params,
        grads: &GradBuffer,
        rates: StepRates,
    ) -> Result<f32> {
        let counted = grads.counted(rank, params.specs())?;
        let grads = (0..self.masters.len()).map(|i| grads.get(ParamId(i))).collect::<Result<Vec<_>, _>>()?;
        let (k, s) = (&rank.kernels, &rank.compute);
        self.write_scalars(rank, rates, None)?;
        k.clip_factor(s, &counted.iter().collect::<Vec<_>>(), self.max_norm, &self.scalars)?;
        if rank.model.size() > 1 {
            // The squares of all ranks make the norm of the whole model.
            let mine = f64::from(self.norm(rank)?);
            let square = s.upload(&[mine * mine], &[1], Category::Communication)?;
            rank.model.all_reduce(s, &square, Reduce::Sum, "gradient norm")?;
            let norm = s.download::<f64>(&square)?[0].sqrt();
            let clip = self.max_norm.map_or(1.0, |max| clip_factor(norm, f64::from(max)));
            self.write_scalars(rank, rates, Some((norm as f32, clip)))?;
        }
        let narrow = params.dtype() != DType::F32;
        let list: Vec<Update> = (0..self.masters.len())
            .map(|i| Update {
                master: &self.masters[i],
                weight: narrow.then(|| &params.values()[i]),
                grad: &grads[i],
                first: &self.first[i],
                second: self.second.get(i),
                lr_mult: 1.0,
                wd_mult: if self.decays[i] { 1.0 } else { 0.0 },
            })
            .collect();
        match self.rule {
            Rule::Adam(adam) => k.adam(s, adam, &self.scalars, &list)?,
            Rule::Sgd(sgd) => k.sgd(s, sgd, &self.scalars, &list)?,
        }
        self.steps += 1;
        self.norm(rank)
    }

    /// The gradient norm in the buffer of step scalars.
    fn norm(&self, rank: &Rank) -> Result<f32> {
        let norm: Vec<f32> = rank.compute.download(&self.scalars.narrow(0, scalars::GRAD_NORM, 1)?)?;
        Ok(norm[0])
    }

    /// Everything that changes from step to step, in one small upload.
    fn write_scalars(&self, rank: &Rank, rates: StepRates, clip: Option<(f32, f32)>) -> Result<()> {
        let t = self.steps as i32 + 1;
        let correction = |beta: f32| (1.0 - f64::from(beta).powi(t)) as f32;
        let mut values = [0f32; scalars::COUNT];
        values[scalars::LR] = rates.lr as f32;
        values[scalars::WEIGHT_DECAY] = rates.weight_decay as f32;
        if let Rule::Adam(a) = self.rule {
            values[scalars::BIAS1] = correction(a.beta1);
            values[scalars::BIAS2] = correction(a.beta2);
        }
        (values[scalars::GRAD_NORM], values[scalars::CLIP]) = clip.unwrap_or((0.0, 1.0));
        values[scalars::STEPS_DONE] = self.steps as f32;
        Ok(rank.compute.write_to(&self.scalars, &values)?)
    }
}
