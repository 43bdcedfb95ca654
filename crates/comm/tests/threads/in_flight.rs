//! Overlapped communication under the race checker: buffers stay safe when it is waited for, dropped, or fails.

use crate::support::*;
use ferrotron_comm::{Communicator, InFlight};
use ferrotron_tensor::{Category, DType, Error, Event, Result, Stream, Tensor};

const COUNT: usize = 4096;

/// Input and output of an all-to-all, on the compute stream.
fn buffers(compute: &Stream) -> Result<(Tensor, Tensor)> {
    let input = compute.zeros(&[COUNT], DType::F32, Category::Communication)?;
    Ok((input, Tensor::empty(compute, &[COUNT], DType::F32, Category::Communication)?))
}

/// Allocations of the same size on the compute stream: they get the blocks that were freed last.
fn reuse(compute: &Stream) -> Result<()> {
    let again: Vec<Tensor> =
        (0..4).map(|_| compute.zeros(&[COUNT], DType::F32, Category::Activations)).collect::<Result<_>>()?;
    drop(again);
    Ok(())
}

fn injected<T>() -> Result<T> {
    Err(Error::Unsupported { op: "test", what: "injected".into() })
}

/// Where an error is injected.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// The next operation fails: the exchange is dropped without a wait.
    AfterLaunch,
    /// The launch itself fails, after its collective was queued.
    InLaunch,
}

fn exchange(g: &Communicator, compute: &Stream, comm: &Stream, fault: Fault) -> Result<Vec<f32>> {
    let (input, output) = buffers(compute)?;
    let sent = input.clone();
    let launched = InFlight::launch((compute, comm), output, vec![input], |s, output| {
        g.all_to_all(s, &sent, output, "tokens")?;
        if fault == Fault::InLaunch { injected() } else { Ok(()) }
    })?;
    drop(sent);
    if fault == Fault::AfterLaunch {
        injected::<()>()?;
    }
    let output = launched.wait(compute)?;
    compute.download::<f32>(&output)
}

#[test]
fn an_error_between_launch_and_wait_keeps_the_buffers_until_the_exchange_is_done() {
    for fault in [Fault::None, Fault::AfterLaunch, Fault::InLaunch] {
        on_ranks(4, LONG, |world, compute| {
            let comm = compute.device().stream("comm").unwrap();
            for _ in 0..3 {
                let result = exchange(&world.all(), &compute, &comm, fault);
                assert_eq!(result.is_ok(), fault == Fault::None, "{fault:?}: {result:?}");
                reuse(&compute).unwrap();
            }
        });
    }
}

/// The same exchange held together by a bare event, as a control: the checker sees the block reused too early.
#[test]
fn a_bare_event_lets_the_buffer_be_reused_too_early() {
    fn exchange(g: &Communicator, compute: &Stream, comm: &Stream) -> Result<Event> {
        let (input, output) = buffers(compute)?;
        comm.wait(&compute.record()?)?;
        g.all_to_all(comm, &input, &output, "tokens")?;
        comm.record()
    }
    let races = on_ranks(4, LONG, |world, compute| {
        let comm = compute.device().stream("comm").unwrap();
        let _done = exchange(&world.all(), &compute, &comm).unwrap();
        let raced = reuse(&compute).is_err_and(|e| e.to_string().contains("reused too early"));
        // No rank exits before all are past the collective.
        world.all().barrier("end").unwrap();
        raced
    });
    assert_eq!(races, [true; 4]);
}

#[test]
fn a_value_may_be_taken_on_a_third_stream() {
    on_ranks(2, LONG, |world, compute| {
        let (comm, third) =
            (compute.device().stream("comm").unwrap(), compute.device().stream("third").unwrap());
        let (g, me) = (world.all(), world.rank());
        let input = tensor(&compute, &values::<f32>(me, COUNT));
        let all = blank::<f32>(&compute, 2 * COUNT);
        let sent = input.clone();
        let launched = InFlight::launch((&compute, &comm), all, vec![input], |s, all| {
            g.all_gather(s, &sent, all, "weights")
        });
        let gathered = launched.unwrap().map(|all| all.narrow(0, COUNT, COUNT).unwrap());
        assert!(gathered.if_ready().is_none());
        let other = gathered.wait(&third).unwrap();
        assert_eq!(third.download::<f32>(&other).unwrap(), values::<f32>(1, COUNT));
        compute.wait(&third.record().unwrap()).unwrap();
        drop((other, sent));
        reuse(&compute).unwrap();
    });
}

#[test]
fn on_one_stream_the_value_is_ready_at_once() {
    on_ranks(2, LONG, |world, s| {
        let (input, output) = buffers(&s).unwrap();
        let launched = InFlight::launch((&s, &s), output, vec![], |s, output| {
            world.all().all_to_all(s, &input, output, "tokens")
        })
        .unwrap();
        assert!(launched.if_ready().is_some());
        assert_eq!(s.download::<f32>(&launched.wait(&s).unwrap()).unwrap(), [0.0; COUNT]);
    });
}
