//! Which layers are offloaded, when their device memory is released and when they are reloaded.

/// When an offloaded layer moves, in layers of its chunk: `0..L`, and `L` for the output (final norm, LM head) after them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerMoves {
    /// Its device memory is released before the forward of this layer.
    pub release_before: usize,
    /// Its reload starts before the backward of this layer.
    pub reload_before: usize,
}

/// The moves of each layer of a chunk; `None` for layers that stay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OffloadPlan {
    /// By layer.
    pub layers: Vec<Option<LayerMoves>>,
}

/// Bytes per second between device and host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Device to host.
    pub to_host: f64,
    /// Host to device.
    pub from_host: f64,
}

/// One layer as the planner sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerProfile {
    /// Seconds of its forward.
    pub forward: f64,
    /// Seconds of its backward.
    pub backward: f64,
    /// Bytes that can be offloaded.
    pub bytes: f64,
}

/// A plan with what it is expected to do.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedOffload {
    /// The plan.
    pub plan: OffloadPlan,
    /// Time at which each offloaded layer is on the host, from the start of forward, in order of layers.
    pub done: Vec<f64>,
    /// Time at which each reload starts, in the same order.
    pub reload_start: Vec<f64>,
    /// Largest sum of resident bytes of layers.
    pub peak: f64,
    /// Seconds that computation waits for copies in one pass forward and backward.
    pub stall: f64,
}

impl OffloadPlan {
    /// The first `count` of `layers` layers on the default schedule: layer i is released before the forward of layer
    /// L − K + i and reloaded before the backward of layer L − 1 − K + i, so that never more than L − K layers are resident.
    /// The last layer's backward follows at once: at most L − 1 layers move.
    pub fn first(count: usize, layers: usize) -> OffloadPlan {
        let count = count.min(layers.saturating_sub(1));
        let moves = |i: usize| LayerMoves {
            release_before: layers - count + i,
            reload_before: layers - 1 - count + i,
        };
        OffloadPlan { layers: (0..layers).map(|i| (i < count).then(|| moves(i))).collect() }
    }

    /// All of `layers` layers but the last, where the copies of a layer take less time than its forward: a layer is released
    /// a whole layer after its own forward, and reloaded during the backward of the next one.
    pub fn streamed(layers: usize) -> OffloadPlan {
        let moves = |i: usize| LayerMoves { release_before: (i + 2).min(layers), reload_before: i + 1 };
        OffloadPlan { layers: (0..layers).map(|i| (i + 1 < layers).then(|| moves(i))).collect() }
    }

    /// The moves of a layer.
    pub fn layer(&self, layer: usize) -> Option<LayerMoves> {
        self.layers.get(layer).copied().flatten()
    }

    /// Layers to release before the forward of layer `before`.
    pub fn releases(&self, before: usize) -> impl Iterator<Item = usize> + '_ {
        self.having(move |m| m.release_before == before)
    }

    /// Layers to reload before the backward of layer `before`, those needed first in front.
    pub fn reloads(&self, before: usize) -> impl Iterator<Item = usize> + '_ {
        let mut found: Vec<usize> = self.having(move |m| m.reload_before == before).collect();
        found.reverse();
        found.into_iter()
    }

    fn having(&self, which: impl Fn(&LayerMoves) -> bool) -> impl Iterator<Item = usize> {
        self.layers.iter().enumerate().filter(move |(_, m)| m.as_ref().is_some_and(&which)).map(|(i, _)| i)
    }

    /// True if nothing is offloaded.
    pub fn is_empty(&self) -> bool {
        self.layers.iter().all(Option::is_none)
    }
}

/// Plans the offload of the layers `chosen` (ascending): a layer is released when its copy, in the queue of all copies, is
/// complete, and reloaded as late as its own copy and those after it allow. One pass forward and backward over the chunk;
/// times of copies count from when layers have run without waiting.
pub fn plan(layers: &[LayerProfile], chosen: &[usize], link: Link) -> PlannedOffload {
    let count = layers.len();
    // Start of each layer's forward, and the end of all of them.
    let mut starts = vec![0.0; count + 1];
    for (l, layer) in layers.iter().enumerate() {
        starts[l + 1] = starts[l] + layer.forward;
    }
    let end = starts[count];
    // Start of each layer's backward, from the last layer to the first.
    let mut backward = vec![end; count];
    for l in (1..count).rev() {
        backward[l - 1] = backward[l] + layers[l].backward;
    }
    let (mut done, mut stall) = (Vec::with_capacity(chosen.len()), 0f64);
    let mut at = 0f64;
    for &i in chosen {
        at = at.max(starts[i + 1]) + layers[i].bytes / link.to_host;
        done.push(at);
    }
    stall += (at - end).max(0.0);
    // The queue of reloads is filled from its end: layer 0 is needed last.
    let (mut last, mut reload_start) = (f64::INFINITY, Vec::with_capacity(chosen.len()));
    for &i in chosen {
        last = backward[i].min(last) - layers[i].bytes / link.from_host;
        reload_start.push(last);
    }
    let mut plan = OffloadPlan { layers: vec![None; count] };
    for (at, &i) in chosen.iter().enumerate() {
        let release_before = (i + 1..=count).find(|l| starts[*l] >= done[at]).unwrap_or(count);
        // Of the layers whose backward starts early enough, the one that runs last; at least one layer ahead.
        let started = (0..count).find(|l| backward[*l] <= reload_start[at]);
        let reload_before = started.unwrap_or(count - 1).max(i + 1).min(count - 1);
        stall += if started.is_none() { backward[count - 1] - reload_start[at] } else { 0.0 };
        plan.layers[i] = Some(LayerMoves { release_before, reload_before });
    }
    let peak = peak(layers, &plan);
    PlannedOffload { plan, done, reload_start, peak, stall }
}

/// Largest sum of resident bytes, over the forward and the backward of every layer.
fn peak(layers: &[LayerProfile], plan: &OffloadPlan) -> f64 {
    let count = layers.len();
    let forward = (0..count).map(|l| {
        let there = |i: &usize| plan.layer(*i).is_none_or(|m| m.release_before > l);
        (0..=l).filter(there).map(|i| layers[i].bytes).sum::<f64>()
    });
    let backward = (0..count).map(|l| {
        // Layers after l are done; of the others those that stay, and those whose reload has begun.
        let there =
            |i: &usize| plan.layer(*i).is_none_or(|m| m.reload_before >= l || m.release_before >= count);
        (0..=l).filter(there).map(|i| layers[i].bytes).sum::<f64>()
    });
    forward.chain(backward).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: Link = Link { to_host: 1.0, from_host: 1.0 };

    fn uniform(count: usize, bytes: f64) -> Vec<LayerProfile> {
        vec![LayerProfile { forward: 1.0, backward: 2.0, bytes }; count]
    }

    fn moves(p: &PlannedOffload) -> (Vec<usize>, Vec<usize>) {
        p.plan.layers.iter().flatten().map(|m| (m.release_before, m.reload_before)).unzip()
    }

    #[test]
    fn uniform_layers() {
        let p = plan(&uniform(8, 1.5), &[0, 1, 2, 3], LINK);
        assert_eq!(p.done, [2.5, 4.0, 5.5, 7.0]);
        assert_eq!(moves(&p), (vec![3, 4, 6, 7], vec![1, 2, 3, 4]));
        assert_eq!((p.peak / 1.5, p.stall), (4.0, 0.0));
    }

    #[test]
    fn unequal_layers() {
        let layers: Vec<LayerProfile> = (0..8)
            .map(|i| match i % 2 {
                0 => LayerProfile { forward: 1.0, backward: 2.0, bytes: 0.5 },
                _ => LayerProfile { forward: 2.0, backward: 4.0, bytes: 3.0 },
            })
            .collect();
        let p = plan(&layers, &[0, 1, 2, 3], LINK);
        assert_eq!(p.done, [1.5, 6.0, 6.5, 9.5]);
        assert_eq!(p.reload_start, [33.5, 27.0, 26.5, 21.0]);
        assert_eq!(moves(&p), (vec![2, 4, 5, 7], vec![1, 3, 3, 5]));
        assert_eq!((p.peak, p.stall), (7.0, 0.0));
    }

    /// K_free = min(L − 2, ⌊(L − 2) / max(1, r)⌋) for uniform layers whose copy takes r forwards.
    #[test]
    fn as_many_layers_are_free_as_the_link_allows() {
        for (count, ratio, free) in
            [(32, 1.5, 20), (32, 2.0, 15), (32, 3.0, 10), (80, 1.5, 52), (80, 2.0, 39)]
        {
            let layers = uniform(count, ratio);
            // The last copy must be complete when the last layer's forward starts.
            let is_free = |k: usize| {
                let p = plan(&layers, &(0..k).collect::<Vec<_>>(), LINK);
                p.stall == 0.0 && p.plan.layers.iter().flatten().all(|m| m.release_before < count)
            };
            assert_eq!(
                (1..count - 1).take_while(|k| is_free(*k)).count(),
                free,
                "{count} layers, ratio {ratio}"
            );
        }
    }

    #[test]
    fn the_default_schedule_keeps_the_resident_layers_constant() {
        for count in 2..10 {
            for k in 0..count {
                let p = OffloadPlan::first(k, count);
                assert_eq!(p.layers.iter().flatten().count(), k);
                let resident = peak(&uniform(count, 1.0), &p);
                assert!(resident <= (count - k).max(1) as f64, "{k} of {count}: {resident}");
            }
        }
        assert_eq!(OffloadPlan::first(9, 4), OffloadPlan::first(3, 4));
        assert!(OffloadPlan::first(1, 1).is_empty() && OffloadPlan::first(0, 0).is_empty());
    }
}
