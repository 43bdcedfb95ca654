//! Which layers are offloaded, when their device memory is released and when they are reloaded.

/// When an offloaded layer moves, in layers of its chunk: `0..L`, and `L` for the output (final norm, LM head) after them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerMoves {
    /// The allocations that move.
    pub allocations: AllocationSet,
    /// Their device memory is released before the forward of this layer.
    pub release_before: usize,
    /// Their reload starts before the backward of this layer.
    pub reload_before: usize,
}

/// Some allocations of a layer, by their place in the order in which forward wrote them. Of a place past 63 all or none are in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocationSet(u64);

impl AllocationSet {
    /// Every allocation.
    pub const ALL: AllocationSet = AllocationSet(u64::MAX);

    /// Whether the allocation at place `i` is in it.
    pub fn contains(self, i: usize) -> bool {
        if i < 64 { self.0 >> i & 1 == 1 } else { self == AllocationSet::ALL }
    }

    /// The set with the allocation at place `i` too; places past 63 are left out.
    pub fn with(self, i: usize) -> AllocationSet {
        AllocationSet(self.0 | if i < 64 { 1 << i } else { 0 })
    }
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
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerProfile {
    /// Seconds of its forward.
    pub forward: f64,
    /// Seconds of its backward.
    pub backward: f64,
    /// Bytes of each allocation that can be offloaded, in the order in which forward wrote them.
    pub allocations: Vec<usize>,
}

/// One pass of a chunk, forward and backward.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChunkProfile {
    /// Its layers.
    pub layers: Vec<LayerProfile>,
    /// Seconds between the last layer's forward and its backward: final norm, LM head and loss.
    pub output: f64,
}

/// What a plan is expected to do in one pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// Largest sum of resident bytes of layers.
    pub peak: usize,
    /// Seconds that computation waits for copies.
    pub stall: f64,
}

impl LayerProfile {
    /// Bytes of some of its allocations.
    fn bytes(&self, set: AllocationSet) -> usize {
        let chosen = self.allocations.iter().enumerate().filter(|(i, _)| set.contains(*i));
        chosen.map(|(_, bytes)| bytes).sum()
    }
}

impl ChunkProfile {
    /// Bytes of a layer that a plan moves.
    fn moved(&self, plan: &OffloadPlan, layer: usize) -> usize {
        plan.layer(layer).map_or(0, |m| self.layers[layer].bytes(m.allocations))
    }

    /// Bytes of all layers that a plan moves.
    pub fn all_moved(&self, plan: &OffloadPlan) -> usize {
        (0..self.layers.len()).map(|l| self.moved(plan, l)).sum()
    }

    /// Bytes that all layers together could move.
    pub fn movable(&self) -> usize {
        self.layers.iter().map(|l| l.bytes(AllocationSet::ALL)).sum()
    }

    /// Seconds of computation.
    pub fn seconds(&self) -> f64 {
        self.layers.iter().map(|l| l.forward + l.backward).sum::<f64>() + self.output
    }

    /// Seconds between the end of the first layer's forward and the start of the last one's.
    pub fn window(&self) -> f64 {
        let between = self.layers.len().saturating_sub(2);
        self.layers.iter().skip(1).take(between).map(|l| l.forward).sum()
    }

    /// Runs a plan in time: computation in order, each direction of the link in order, waits as [`super`] makes them.
    pub fn run(&self, plan: &OffloadPlan, link: Link) -> Expected {
        let count = self.layers.len();
        let (mut now, mut to_host, mut from_host) = (0f64, 0f64, 0f64);
        let (mut copied, mut loaded) = (vec![0f64; count], vec![0f64; count]);
        for l in 0..=count {
            now = plan.releases(l).map(|i| copied[i]).fold(now, f64::max);
            let Some(layer) = self.layers.get(l) else { continue };
            now += layer.forward;
            if plan.layer(l).is_some() {
                to_host = to_host.max(now) + self.moved(plan, l) as f64 / link.to_host;
                copied[l] = to_host;
            }
        }
        now += self.output;
        for (l, layer) in self.layers.iter().enumerate().rev() {
            for i in plan.reloads(l) {
                from_host = from_host.max(now) + self.moved(plan, i) as f64 / link.from_host;
                loaded[i] = from_host;
            }
            now = now.max(loaded[l]) + layer.backward;
        }
        Expected { peak: self.peak(plan), stall: (now - self.seconds()).max(0.0) }
    }

    /// Largest sum of resident bytes that can move, over the forward and the backward of every layer.
    pub fn peak(&self, plan: &OffloadPlan) -> usize {
        let count = self.layers.len();
        let resident = |last: usize, there: &dyn Fn(LayerMoves) -> bool| -> usize {
            let of = |i: usize| {
                let away = plan.layer(i).is_some_and(|m| !there(m));
                self.layers[i].bytes(AllocationSet::ALL) - if away { self.moved(plan, i) } else { 0 }
            };
            (0..=last).map(of).sum()
        };
        let forward = (0..count).map(|l| resident(l, &|m| m.release_before > l));
        // Layers after l are done; of the others those that stay, and those whose reload has begun.
        let backward = (0..count).map(|l| resident(l, &|m| m.reload_before >= l || m.release_before > count));
        forward.chain(backward).max().unwrap_or(0)
    }

    /// Plans the offload of the layers `chosen` (ascending), of each some allocations: a layer is released when its copy,
    /// in the queue of all copies, is complete, and reloaded as late as its own copy and those after it allow, but `lead`
    /// layers earlier where the default schedule would do so too. Times count from when layers have run without waiting.
    pub fn plan(&self, chosen: &[(usize, AllocationSet)], link: Link, lead: usize) -> OffloadPlan {
        let (layers, count) = (&self.layers, self.layers.len());
        // Start of each layer's forward, and the end of all of them.
        let mut starts = vec![0.0; count + 1];
        for (l, layer) in layers.iter().enumerate() {
            starts[l + 1] = starts[l] + layer.forward;
        }
        // Start of each layer's backward, from the last layer to the first.
        let mut backward = vec![starts[count] + self.output; count];
        for l in (1..count).rev() {
            backward[l - 1] = backward[l] + layers[l].backward;
        }
        let mut plan = OffloadPlan { layers: vec![None; count] };
        // The queue of reloads is filled from its end: layer 0 is needed last.
        let (mut done, mut reload) = (0f64, f64::INFINITY);
        for (at, &(i, of)) in chosen.iter().enumerate() {
            let bytes = layers[i].bytes(of) as f64;
            done = done.max(starts[i + 1]) + bytes / link.to_host;
            reload = reload.min(backward[i]) - bytes / link.from_host;
            let release_before = (i + 1..=count).find(|l| starts[*l] >= done).unwrap_or(count);
            // Of the layers whose backward starts early enough, the one that runs last; at least one layer ahead.
            let started = (0..count).find(|l| backward[*l] <= reload);
            let earlier = |l: usize| l.max((l + lead).min((count - 1 + at).saturating_sub(chosen.len())));
            let reload_before = started.map_or(count - 1, |l| earlier(l).max(i + 1).min(count - 1));
            plan.layers[i] = Some(LayerMoves { allocations: of, release_before, reload_before });
        }
        plan
    }
}

impl OffloadPlan {
    /// The first `count` of `layers` layers on the default schedule: layer i is released before the forward of layer
    /// L − K + i and reloaded before the backward of layer L − 1 − K + i, so that never more than L − K layers are resident.
    /// The last layer's backward follows at once: at most L − 1 layers move.
    pub fn first(count: usize, layers: usize) -> OffloadPlan {
        let count = count.min(layers.saturating_sub(1));
        let moves = |i: usize| LayerMoves {
            allocations: AllocationSet::ALL,
            release_before: layers - count + i,
            reload_before: layers - 1 - count + i,
        };
        OffloadPlan { layers: (0..layers).map(|i| (i < count).then(|| moves(i))).collect() }
    }

    /// All of `layers` layers but the last, where the copies of a layer take less time than its forward: a layer is released
    /// a whole layer after its own forward, and reloaded during the backward of the next one.
    pub fn streamed(layers: usize) -> OffloadPlan {
        let moves = |i: usize| LayerMoves {
            allocations: AllocationSet::ALL,
            release_before: (i + 2).min(layers),
            reload_before: i + 1,
        };
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A byte takes 1 ms.
    const LINK: Link = Link { to_host: 1e3, from_host: 1e3 };

    fn layer(forward: f64, bytes: usize) -> LayerProfile {
        LayerProfile { forward, backward: 2.0 * forward, allocations: vec![bytes] }
    }

    fn uniform(count: usize, bytes: usize) -> ChunkProfile {
        ChunkProfile { layers: vec![layer(1.0, bytes); count], output: 0.0 }
    }

    fn whole(layers: std::ops::Range<usize>) -> Vec<(usize, AllocationSet)> {
        layers.map(|l| (l, AllocationSet::ALL)).collect()
    }

    fn moves(p: &OffloadPlan) -> (Vec<usize>, Vec<usize>) {
        p.layers.iter().flatten().map(|m| (m.release_before, m.reload_before)).unzip()
    }

    #[test]
    fn uniform_layers() {
        let chunk = uniform(8, 1500);
        let p = chunk.plan(&whole(0..4), LINK, 0);
        // Copies are done at 2.5, 4, 5.5 and 7.
        assert_eq!(moves(&p), (vec![3, 4, 6, 7], vec![1, 2, 3, 4]));
        assert_eq!(chunk.run(&p, LINK), Expected { peak: 4 * 1500, stall: 0.0 });
    }

    #[test]
    fn unequal_layers() {
        let layers = (0..8).map(|i| if i % 2 == 0 { layer(1.0, 500) } else { layer(2.0, 3000) }).collect();
        let chunk = ChunkProfile { layers, output: 0.0 };
        let p = chunk.plan(&whole(0..4), LINK, 0);
        // Copies are done at 1.5, 6, 6.5 and 9.5; reloads start at 33.5, 27, 26.5 and 21.
        assert_eq!(moves(&p), (vec![2, 4, 5, 7], vec![1, 3, 3, 5]));
        assert_eq!(chunk.run(&p, LINK), Expected { peak: 7000, stall: 0.0 });
        assert_eq!((chunk.movable(), chunk.all_moved(&p)), (14000, 7000));
    }

    /// K_free = min(L − 2, ⌊(L − 2) / max(1, r)⌋) for uniform layers whose copy takes r forwards.
    #[test]
    fn as_many_layers_are_free_as_the_link_allows() {
        for (count, bytes, free) in
            [(32, 1500, 20), (32, 2000, 15), (32, 3000, 10), (80, 1500, 52), (80, 2000, 39), (16, 500, 14)]
        {
            let chunk = uniform(count, bytes);
            // The last copy must be complete when the last layer's forward starts.
            let is_free = |k: usize| {
                let p = chunk.plan(&whole(0..k), LINK, 0);
                let released = p.layers.iter().flatten().all(|m| m.release_before < count);
                chunk.run(&p, LINK).stall == 0.0 && released
            };
            assert_eq!((1..count - 1).take_while(|k| is_free(*k)).count(), free, "{count} of {bytes}");
            // Beyond, forward waits: about K·x − (L − 2)·f.
            let k = free + 2;
            if k < count && bytes > 1000 {
                let p = OffloadPlan::first(k, count);
                let waits = (k * bytes) as f64 / 1e3 - (count - 2) as f64;
                let stall = chunk.run(&p, LINK).stall;
                assert!((stall - waits).abs() <= 1.0, "{k} of {count}: {stall} s instead of {waits}");
            }
        }
    }

    #[test]
    fn the_default_schedule_keeps_the_resident_layers_constant() {
        for count in 2..10 {
            for k in 0..count {
                let p = OffloadPlan::first(k, count);
                assert_eq!(p.layers.iter().flatten().count(), k);
                let resident = uniform(count, 1).peak(&p);
                assert!(resident <= (count - k).max(1), "{k} of {count}: {resident}");
            }
        }
        assert_eq!(OffloadPlan::first(9, 4), OffloadPlan::first(3, 4));
        assert!(OffloadPlan::first(1, 1).is_empty() && OffloadPlan::first(0, 0).is_empty());
    }

    #[test]
    fn a_part_of_a_layer_can_move() {
        let mut chunk = uniform(6, 1000);
        chunk.layers.iter_mut().for_each(|l| l.allocations = vec![300, 100, 600]);
        let some = AllocationSet::default().with(0).with(1);
        let p = chunk.plan(&[(0, AllocationSet::ALL), (1, some)], LINK, 0);
        assert_eq!((chunk.all_moved(&p), chunk.peak(&p)), (1400, 4600));
        assert!(
            some.contains(1) && !some.contains(2) && !some.contains(64) && AllocationSet::ALL.contains(64)
        );
        // The copy of the second layer takes 0.4 of a forward.
        assert_eq!(moves(&p), (vec![2, 3], vec![1, 2]));
    }
}
