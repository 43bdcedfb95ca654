//! Top-k selection of experts, and logits of the router.

use super::z;
use crate::devices::*;
use ferrotron_kernels::{
    ExpertSelection, GroupLimit, RngKey, Route, RouteBackward, RouterParams, ScoreFunction,
};
use ferrotron_tensor::{Category, DType};

#[test]
fn invalid_arguments_are_errors() {
    for h in devices() {
        let (k, s) = (&h.k, &h.s);
        let z = |dtype, shape: &[usize]| z(&h, dtype, shape);
        let (x, i, p) = (z(DType::F32, &[4, 8]), z(DType::I32, &[4, 2]), z(DType::F32, &[4, 2]));
        let plain = RouterParams { score: ScoreFunction::Sigmoid, normalize: true, groups: None, scale: 1.0 };
        let best = ExpertSelection::TopK { bias: None };
        let groups =
            |count, keep, best| RouterParams { groups: Some(GroupLimit { count, keep, best }), ..plain };
        let key = RngKey { seed: 0, step: 0, layer: 0, site: 0 };
        let bf16_logits = z(DType::BF16, &[4, 8]);
        let far = h.s.upload(&[0i32, 8, 0, 0, 0, 0, 0, 0], &[4, 2], Category::Workspace).unwrap();
        let transposed = z(DType::F32, &[8, 4]).transpose(0, 1).unwrap();
        let wide = ExpertSelection::TopK { bias: Some(&p) };
        refused(
            &h,
            "rows",
            k.route(
                s,
                &Route {
                    params: plain,
                    selection: best,
                    logits: &z(DType::F32, &[3, 8]),
                    index: &i,
                    probs: &p,
                },
            ),
        );
        refused(
            &h,
            "strides",
            k.route(s, &Route { params: plain, selection: best, logits: &transposed, index: &i, probs: &p }),
        );
        refused(
            &h,
            "type",
            k.route(
                s,
                &Route {
                    params: plain,
                    selection: best,
                    logits: &z(DType::I32, &[4, 8]),
                    index: &i,
                    probs: &p,
                },
            ),
        );
        refused(
            &h,
            "probabilities",
            k.route(
                s,
                &Route {
                    params: plain,
                    selection: best,
                    logits: &x,
                    index: &i,
                    probs: &z(DType::F32, &[4, 3]),
                },
            ),
        );
        refused(
            &h,
            "16-bit probabilities",
            k.route(
                s,
                &Route {
                    params: plain,
                    selection: best,
                    logits: &x,
                    index: &i,
                    probs: &z(DType::BF16, &[4, 2]),
                },
            ),
        );
        refused(
            &h,
            "bias",
            k.route(
                s,
                &Route {
                    params: plain,
                    selection: wide,
                    logits: &x,
                    index: &i,
                    probs: &z(DType::F32, &[4, 2]),
                },
            ),
        );
        refused(
            &h,
            "too many selections",
            k.route(
                s,
                &Route {
                    params: plain,
                    selection: best,
                    logits: &z(DType::F32, &[4, 1]),
                    index: &i,
                    probs: &p,
                },
            ),
        );
        refused(
            &h,
            "too many experts",
            k.route(
                s,
                &Route {
                    params: plain,
                    selection: best,
                    logits: &z(DType::F32, &[4, 1025]),
                    index: &i,
                    probs: &p,
                },
            ),
        );
        refused(
            &h,
            "uneven groups",
            k.route(s, &Route { params: groups(3, 1, 1), selection: best, logits: &x, index: &i, probs: &p }),
        );
        refused(
            &h,
            "more groups than there are",
            k.route(s, &Route { params: groups(2, 4, 1), selection: best, logits: &x, index: &i, probs: &p }),
        );
        refused(
            &h,
            "groups ranked by more experts than they have",
            k.route(s, &Route { params: groups(4, 4, 3), selection: best, logits: &x, index: &i, probs: &p }),
        );
        refused(
            &h,
            "small groups",
            k.route(s, &Route { params: groups(8, 1, 1), selection: best, logits: &x, index: &i, probs: &p }),
        );
        refused(
            &h,
            "no groups",
            k.route(s, &Route { params: groups(0, 0, 0), selection: best, logits: &x, index: &i, probs: &p }),
        );
        refused(
            &h,
            "an expert that is not",
            k.route(
                s,
                &Route {
                    params: plain,
                    selection: ExpertSelection::Given,
                    logits: &x,
                    index: &far,
                    probs: &p,
                },
            ),
        );
        refused(
            &h,
            "its gradient",
            k.route_backward(
                s,
                &RouteBackward {
                    params: plain,
                    logits: &x,
                    index: &far,
                    dprobs: &p,
                    dlogits: &z(DType::F32, &[4, 8]),
                },
            ),
        );
        refused(
            &h,
            "type of the gradient",
            k.route_backward(
                s,
                &RouteBackward { params: plain, logits: &x, index: &i, dprobs: &p, dlogits: &bf16_logits },
            ),
        );
        refused(&h, "bf16 scores", k.top_k(s, &bf16_logits, None, &i));
        refused(&h, "what is subtracted", k.top_k(s, &x, Some(&p), &i));
        refused(&h, "a gate of two dtypes", k.gate_f64(s, &x, &bf16_logits, &z(DType::F32, &[4, 4])));
        refused(&h, "its width", k.gate_f64(s, &x, &z(DType::F32, &[4, 7]), &z(DType::F32, &[4, 4])));
        refused(&h, "numbers of rows", k.fill_normal_logits(s, key.into(), &h.ids(&[0, 1, 2]), &x));
        refused(
            &h,
            "16-bit normal values",
            k.fill_normal_logits(s, key.into(), &h.ids(&[0, 1, 2, 3]), &bf16_logits),
        );
    }
}
