//! Captures of a stream: what is refused, and what a graph keeps.

use super::card;
use ferrotron_tensor::{Category, DType, Tensor};

#[test]
fn failed_captures_are_errors_and_leave_the_stream_usable() {
    let Some((rank, _alone)) = card() else { return };
    let s = &rank.compute;
    let t = s.upload(&[1f32, 2.0], &[2], Category::Workspace).unwrap();
    let mut kept = None;
    let (other, before) = (rank.device().stream("other").unwrap(), s.record().unwrap());
    let refused = [
        s.capture(|| s.upload_into(&t, &[3f32, 4.0])).err(),
        s.capture(|| s.download::<f32>(&t).map(drop)).err(),
        s.capture(|| other.wait(&s.record()?)).err(),
        s.capture(|| s.wait(&before)).err(),
        s.capture(|| s.synchronize()).err(),
        s.capture(|| {
            kept = Some(Tensor::empty(s, &[4], DType::F32, Category::Workspace)?);
            Ok::<_, ferrotron_tensor::Error>(())
        })
        .err(),
    ];
    for (i, e) in refused.iter().enumerate() {
        let e = e.as_ref().unwrap_or_else(|| panic!("case {i} was captured")).to_string();
        assert!(e.contains("captured") || e.contains("keeps memory"), "{e}");
    }
    assert_eq!(s.download::<f32>(&t).unwrap(), [1.0, 2.0]);
    // A successful capture executes nothing before its replay.
    let graph = s
        .capture(|| {
            let inside = Tensor::empty(s, &[2], DType::F32, Category::Workspace)?;
            s.zero(&inside)?;
            s.copy(&inside, &t)
        })
        .unwrap();
    assert_eq!(graph.nodes(), 2);
    assert_eq!(s.download::<f32>(&t).unwrap(), [1.0, 2.0]);
    graph.replay().unwrap();
    assert_eq!(s.download::<f32>(&t).unwrap(), [0.0, 0.0]);
    // The graph keeps constants of the host.
    let constant = || s.copy(&s.constant(&[5f32, 6.0], &[2], Category::Workspace)?, &t);
    let graph = s.capture(constant).unwrap();
    for _ in 0..2 {
        s.zero(&t).unwrap();
        graph.replay().unwrap();
        assert_eq!(s.download::<f32>(&t).unwrap(), [5.0, 6.0]);
    }
}
