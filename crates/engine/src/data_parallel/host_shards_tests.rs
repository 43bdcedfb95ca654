use super::HostEdge;
use crate::data_parallel::{BucketLimit, HostShards, Placement, ShardingStrategy};
use crate::{
    Declarations, GradBuffer, Init, ParamId, ParamLayout, Params, Part, Rank, Split, UnitId, WeightGrad,
};
use ferrotron_tensor::{Category, DType, Instrumentation, Result};

const LEN: usize = 128;
const EDGES: [Option<HostEdge>; 4] =
    [None, Some(HostEdge::Vacated), Some(HostEdge::Stored), Some(HostEdge::Loaded)];

/// Three units of one parameter each, in host memory, on one rank under the race checker.
fn params(host: HostShards, comm_unit: usize) -> (Rank, Params) {
    let watch = Instrumentation { race_check: true, ..Instrumentation::default() };
    let rank = Rank::cpu_instrumented(1, 0, watch).unwrap();
    let mut d = Declarations::default();
    for i in 0..3 {
        d.begin_unit();
        let (name, init) = (format!("p{i}"), Init::Constant(0.0));
        d.declare(vec![Part { name, shape: vec![LEN], init, split: Split::Replicated }]).unwrap();
    }
    let placement = ShardingStrategy::REPLICATED.with_host(host).param;
    let layout = ParamLayout { placement, bucket: BucketLimit::Unit, comm_unit, outer_pieces: 1, host };
    let params = Params::new(&rank, d.finish(), DType::F32, layout).unwrap();
    (rank, params)
}

/// Steps of two micro-batches, with at most `in_flight` bytes on their way to the host, or one bucket.
fn accumulate(edge: Option<HostEdge>, in_flight: usize) -> Result<Vec<f32>> {
    let host = HostShards { weights: false, gradients: true };
    let (rank, params) = params(host, in_flight);
    *params.link().unwrap().without.lock().unwrap() = edge;
    let scheme =
        ShardingStrategy { param: Placement::Replicate, ..ShardingStrategy::REPLICATED.with_host(host) };
    let mut grads = GradBuffer::of(&params, scheme);
    for step in 0..2 {
        grads.begin_step(2);
        for micro in 0..2 {
            for param in (0..3).rev() {
                let values = vec![(1 + step + 10 * micro + 100 * param) as f32; LEN];
                let x = rank.compute.upload(&values, &[1, LEN], Category::Activations)?;
                WeightGrad::column_sums(ParamId(param), &x).run(&rank, &mut grads)?;
            }
        }
        grads.reduce(&rank)?;
    }
    grads.gathered(&rank)?.iter().map(|g| Ok(rank.compute.download::<f32>(g)?[0])).collect()
}

/// Updates of weights, and passes that use them one after the other.
fn fetch(edge: Option<HostEdge>) -> Result<Vec<f32>> {
    let (rank, params) = params(HostShards { weights: true, gradients: false }, LEN * DType::F32.size());
    let link = params.link().unwrap();
    *link.without.lock().unwrap() = edge;
    let (s, mut found) = (&rank.compute, Vec::new());
    for step in 0..2 {
        params.wait_params(&rank)?;
        let mut updated = Vec::new();
        for (i, host) in params.values().iter().enumerate() {
            updated.push(s.upload(&[(10 * step + i) as f32; LEN], &[LEN], Category::Workspace)?);
            link.to_host.wait(&s.record()?)?;
            link.to_host.copy(&updated[i], host)?;
        }
        params.weights_stored(link.to_host.record()?);
        let order: Vec<UnitId> = (0..3).map(UnitId).collect();
        let sum = s.zeros(&[LEN], DType::F32, Category::Activations)?;
        for _ in 0..2 {
            for at in 0..3 {
                let _unit = params.enter_unit(&rank, order[at], &order[at + 1..])?;
                rank.kernels.add_assign(s, &sum, &*params.weight(&rank, ParamId(at))?)?;
            }
        }
        found.push(s.download::<f32>(&sum)?[0]);
        s.wait(&link.to_host.record()?)?;
    }
    Ok(found)
}

#[test]
fn every_edge_of_gradients_is_needed() {
    for edge in EDGES {
        // Where all are in flight until the end of a step, no memory is reused before; where few are, what is read was waited
        // for when memory was freed.
        let made = [1, usize::MAX].map(|in_flight| accumulate(edge, in_flight));
        match edge {
            None => made.into_iter().for_each(|made| assert_eq!(made.unwrap(), [14.0, 214.0, 414.0])),
            Some(edge) => assert!(made.iter().any(Result::is_err), "{edge:?}: {made:?}"),
        }
    }
}

#[test]
fn every_edge_of_weights_is_needed() {
    for edge in EDGES {
        match (edge, fetch(edge)) {
            (None, made) => assert_eq!(made.unwrap(), [6.0, 66.0]),
            (Some(edge), made) => assert!(made.is_err(), "{edge:?}: {made:?}"),
        }
    }
}
