//! Sends and receives, and concurrent groups.

use crate::support::*;
use ferrotron_comm::{Communicator, Error, ReduceOp, SendRecv};

#[test]
fn rings_in_both_directions() {
    for n in 1..=8 {
        on_ranks(n, LONG, |world, s| {
            let g = world.all();
            let (me, right, left) = (g.rank(), (g.rank() + 1) % n, (g.rank() + n - 1) % n);
            let mut mine = tensor(&s, &values::<f32>(me, 33));
            for step in 1..=n {
                let next = blank::<f32>(&s, 33);
                random_delay((me * 31 + step) as u64);
                g.send_recv(&s, &[(right, &mine)], &[(left, &next)], "ring").unwrap();
                assert_eq!(s.download::<f32>(&next).unwrap(), values::<f32>((me + n * n - step) % n, 33));
                mine = next;
            }
            // Both directions at once, listed in different orders, with empty messages and several messages to one
            // rank.
            let (up, down) = (tensor(&s, &values::<u8>(me, 5)), tensor(&s, &values::<u8>(me + 50, 5)));
            let nothing = blank::<u8>(&s, 0);
            let (from_left, from_right) = (blank::<u8>(&s, 5), blank::<u8>(&s, 5));
            if n > 2 {
                let mut sends = vec![(right, &up), (left, &down), (right, &nothing)];
                let mut receives = vec![(left, &from_left), (right, &from_right), (left, &nothing)];
                if me.is_multiple_of(2) {
                    sends.swap(0, 1);
                    receives.swap(0, 1);
                }
                g.send_recv(&s, &sends, &receives, "both").unwrap();
                assert_eq!(s.download::<u8>(&from_left).unwrap(), values::<u8>(left, 5));
                assert_eq!(s.download::<u8>(&from_right).unwrap(), values::<u8>(right + 50, 5));
            }
        });
    }
}

#[test]
fn messages_stay_in_order_and_senders_do_not_wait() {
    on_ranks(3, LONG, |world, s| {
        let g = world.all();
        let t = blank::<i32>(&s, 2);
        // Everyone sends everything before anyone receives.
        for i in 0..20 {
            for to in 0..3 {
                s.upload_into(&t, &[i, g.rank() as i32]).unwrap();
                g.send(&s, &t, to, "numbered").unwrap();
            }
        }
        for from in (0..3).rev() {
            for i in 0..20 {
                g.receive(&s, &t, from, "numbered").unwrap();
                assert_eq!(s.download::<i32>(&t).unwrap(), [i, from as i32]);
            }
        }
    });
}

#[test]
fn an_unexpected_message_is_named_on_both_sides() {
    let errors = on_ranks(2, LONG, |world, s| {
        let g = world.all();
        let (a, b) = (blank::<f32>(&s, 4), blank::<f32>(&s, 5));
        if g.rank() == 0 {
            g.send(&s, &a, 1, "activation").unwrap();
            g.receive(&s, &a, 1, "gradient").unwrap_err()
        } else {
            g.receive(&s, &b, 0, "activation").unwrap_err()
        }
    });
    for (rank, e) in errors.iter().enumerate() {
        let text = e.to_string();
        assert!(
            text.contains("f32 [4]") && text.contains("f32 [5]") && text.contains("activation"),
            "{text}"
        );
        assert_eq!(rank == 1, matches!(e, Error::Mismatch { rank: 1, other: 0, .. }), "{text}");
    }
}

#[test]
fn subgroups_run_concurrently() {
    // A 2 × 4 grid: rows and columns, used in different orders by different rows.
    on_ranks(8, LONG, |world, s| {
        let (me, mut row, mut column) = (world.rank(), None, None);
        for r in 0..2 {
            let ranks: Vec<usize> = (r * 4..r * 4 + 4).collect();
            row = world.group("row", &ranks).unwrap().or(row);
        }
        for c in 0..4 {
            // Not in ascending order: ranks are numbered in the order given.
            column = world.group("column", &[c + 4, c]).unwrap().or(column);
        }
        let (row, column) = (row.unwrap(), column.unwrap());
        assert_eq!((row.rank(), row.size(), row.name()), (me % 4, 4, "row"));
        assert_eq!((column.rank(), column.ranks()), (1 - me / 4, &[me % 4 + 4, me % 4][..]));
        assert!(world.group("one", &[3]).unwrap().is_none_or(|g| me == 3 && g.size() == 1));
        for round in 0..50 {
            let t = tensor(&s, &[me as i32]);
            random_delay((me * 100 + round) as u64);
            if me < 4 && round % 3 == 0 {
                row.barrier("only the first row").unwrap();
            }
            row.all_reduce(&s, &t, ReduceOp::Sum, "row").unwrap();
            assert_eq!(s.download::<i32>(&t).unwrap(), [if me < 4 { 6 } else { 22 }]);
            column.all_reduce(&s, &t, ReduceOp::Sum, "column").unwrap();
            assert_eq!(s.download::<i32>(&t).unwrap(), [28]);
            column.broadcast(&s, &t, round % 2, "column").unwrap();
        }
        world.all().barrier("end").unwrap();
    });
}

#[test]
fn batches_complete_in_any_order() {
    // Two groups of the same ranks, as in a pipeline with one per direction, each on its own stream.
    on_ranks(2, LONG, |world, s| {
        let down = world.group("down", &[0, 1]).unwrap().unwrap();
        let up = world.group("up", &[0, 1]).unwrap().unwrap();
        let (me, other) = (world.rank(), 1 - world.rank());
        let [first, second] = ["first", "second"].map(|n| s.device().stream(n).unwrap());
        for round in 0..30 {
            let mine = [tensor(&first, &values::<f32>(me, 700)), tensor(&second, &values::<f32>(me + 9, 30))];
            let got = [blank::<f32>(&first, 700), blank::<f32>(&second, 30)];
            random_delay((me * 100 + round) as u64);
            let (sends, receives) = ([0, 1].map(|i| [(other, &mine[i])]), [0, 1].map(|i| [(other, &got[i])]));
            // Each rank sends on one group and receives on the other: what one waits for first, the other sends last.
            // One after the other, both would wait forever.
            let send_recv = |i: usize, group| {
                let (send, receive) = (i == me, i != me);
                let stream = if i == 0 { &first } else { &second };
                let (sends, receives): (&[_], &[_]) =
                    (if send { &sends[i] } else { &[] }, if receive { &receives[i] } else { &[] });
                SendRecv { group, stream, sends, receives }
            };
            let mut batch = vec![send_recv(0, &down), send_recv(1, &up)];
            batch.sort_by_key(|l| l.receives.is_empty());
            Communicator::send_recv_batch(&batch, "crossing").unwrap();
            let i = 1 - me;
            let stream = if i == 0 { &first } else { &second };
            let all = stream.download::<f32>(&got[i]).unwrap();
            assert_eq!(all, if i == 0 { values::<f32>(0, 700) } else { values::<f32>(1 + 9, 30) });
            // The same group twice in one batch: messages arrive in batch order.
            let parts = [blank::<f32>(&second, 30), blank::<f32>(&second, 30)];
            let pair = |i: usize| ([(other, &mine[1])], [(other, &parts[i])]);
            let (a, b) = (pair(0), pair(1));
            let batch =
                [&a, &b].map(|p| SendRecv { group: &up, stream: &second, sends: &p.0, receives: &p.1 });
            Communicator::send_recv_batch(&batch, "twice").unwrap();
            assert_eq!(second.download::<f32>(&parts[1]).unwrap(), values::<f32>(other + 9, 30));
        }
        assert_eq!(
            world.volume().bytes(ferrotron_comm::OpKind::SendRecv) / 30,
            (if me == 0 { 700 } else { 30 } + 60) * 4
        );
    });
}

#[test]
fn a_batch_without_a_peer_is_named() {
    let errors = on_ranks(2, 300, |world, s| {
        let down = world.group("down", &[0, 1]).unwrap().unwrap();
        let up = world.group("up", &[0, 1]).unwrap().unwrap();
        let (t, other) = (blank::<f32>(&s, 4), blank::<f32>(&s, 4));
        let batch = [
            SendRecv { group: &down, stream: &s, sends: &[], receives: &[] },
            SendRecv { group: &up, stream: &s, sends: &[(1, &t)], receives: &[(1, &other)] },
        ];
        if world.rank() == 0 {
            Some(Communicator::send_recv_batch(&batch, "no peer").unwrap_err().to_string())
        } else {
            std::thread::sleep(std::time::Duration::from_millis(900));
            None
        }
    });
    let text = errors[0].clone().unwrap();
    assert!(text.contains("'no peer'") && text.contains("up") && text.contains("rank 1"), "{text}");
}
