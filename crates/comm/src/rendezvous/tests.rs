//! Ranks as threads, among strangers on the loopback interface.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::handshake::{HELLO, Hello, VERSION};
use super::*;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// An address with a free port.
fn free() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn rank(rank: usize, size: usize, at: &str) -> LaunchEnv {
    LaunchEnv::for_test(rank, size, at)
}

fn after(seconds: f64) -> Instant {
    Instant::now() + Duration::from_secs_f64(seconds)
}

/// Connects to `at` as soon as somebody listens there.
fn reach(at: &str) -> TcpStream {
    let start = Instant::now();
    loop {
        match TcpStream::connect(at) {
            Ok(stream) => return stream,
            Err(e) => assert!(start.elapsed() < Duration::from_secs(20), "{e}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The two true ranks of a job meet while `strangers` do what they do.
fn meets_among(strangers: impl Fn(&str) + Sync) {
    let at = &free();
    let limit = after(20.0);
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| meet(&rank(0, 2, at), limit).map(|all| all.len()));
        strangers(at);
        let one = meet(&rank(1, 2, at), limit).map(|all| all.len());
        assert_eq!((zero.join().unwrap().unwrap(), one.unwrap()), (1, 1));
    });
}

#[test]
fn a_stranger_with_the_greeting_is_no_rank() {
    meets_among(|at| {
        // The greeting of rank 1 of 2, and anything as its proof.
        let mut stream = reach(at);
        stream.write_all(&Hello::new(1, 2, [7; 32]).encode()).unwrap();
        stream.read_exact(&mut [0; HELLO + 32]).unwrap();
        stream.write_all(&[0; 32]).unwrap();
        assert_eq!(stream.read(&mut [0; 1]).unwrap_or(0), 0, "it is shown the door");
    });
}

#[test]
fn malformed_hellos_are_ignored() {
    meets_among(|at| {
        // What ended a job once: the greeting of a job of another size, or of a rank that does not exist.
        let (rank, size) = (9u32, 3u32);
        let old = [&b"ferro-01"[..], &rank.to_le_bytes(), &size.to_le_bytes()].concat();
        reach(at).write_all(&old).unwrap();
        reach(at).write_all(&Hello::new(9, 3, [7; 32]).encode()).unwrap();
        reach(at).write_all(&Hello { version: VERSION + 1, ..Hello::new(1, 2, [7; 32]) }.encode()).unwrap();
        reach(at)
            .write_all(b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: a scanner of ports, far too long\r\n\r\n")
            .unwrap();
    });
}

#[test]
fn slow_handshakes_do_not_delay_ranks() {
    let at = &free();
    let (limit, over) = (Duration::from_secs(4), AtomicBool::new(false));
    std::thread::scope(|scope| {
        // Rank 1 never comes; strangers come all the time, more than are kept.
        let start = Instant::now();
        let zero = scope.spawn(|| meet(&rank(0, 2, at), Instant::now() + limit));
        let strangers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let mut held = Vec::new();
                    let hello = Hello::new(1, 2, [7; 32]).encode();
                    while !over.load(Ordering::Relaxed) && held.len() < 200 {
                        if let Ok(mut stream) = TcpStream::connect(at) {
                            let _ = stream.write_all(&hello[..held.len() % HELLO]);
                            held.push(stream);
                        }
                        std::thread::sleep(Duration::from_millis(5));
                    }
                })
            })
            .collect();
        let error = zero.join().unwrap().unwrap_err().to_string();
        over.store(true, Ordering::Relaxed);
        strangers.into_iter().for_each(|s| s.join().unwrap());
        assert!(error.contains("[1] did not connect"), "{error}");
        let took = start.elapsed();
        assert!(took > limit && took < limit + Duration::from_secs(3), "{took:?}");
    });
    // And when it comes, it gets through at once.
    let start = Instant::now();
    let crowd = std::sync::Mutex::new(Vec::new());
    meets_among(|at| crowd.lock().unwrap().extend((0..300).map(|_| reach(at))));
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
}

#[test]
fn those_who_do_not_come_are_named_on_all_who_did() {
    let at = &free();
    std::thread::scope(|scope| {
        for r in [0, 1] {
            scope.spawn(move || {
                let error = meet(&rank(r, 4, at), after(0.7)).unwrap_err().to_string();
                assert!(error.contains("[2, 3]"), "rank {r}: {error}");
            });
        }
    });
    let error = meet(&rank(1, 2, &free()), after(0.3)).unwrap_err().to_string();
    assert!(error.contains("cannot reach rank 0") && error.contains("MASTER_ADDR"), "{error}");
    let error = meet(&rank(1, 2, "no.such.host.invalid:1"), after(0.3)).unwrap_err().to_string();
    assert!(error.contains("no.such.host.invalid"), "{error}");
}

#[test]
fn world_sizes_that_differ_are_named_on_both() {
    let at = &free();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| meet(&rank(0, 2, at), after(20.0)).unwrap_err().to_string());
        let one = meet(&rank(1, 3, at), after(20.0)).unwrap_err().to_string();
        for error in [one, zero.join().unwrap()] {
            assert!(error.contains("rank 1 of 3") && error.contains("expects 2"), "{error}");
        }
    });
}

#[test]
fn another_version_with_the_secret_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (at, secret) = (listener.local_addr().unwrap(), Secret([5; 32]));
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| accept::all_ranks(&listener, 2, &secret, after(20.0), &|| None));
        let mut stream = TcpStream::connect(at).unwrap();
        let hello = Hello { version: VERSION + 7, ..Hello::new(1, 2, [1; 32]) };
        stream.write_all(&hello.encode()).unwrap();
        let mut answer = [0; HELLO + 32];
        stream.read_exact(&mut answer).unwrap();
        stream.write_all(&handshake::answer_proof(&secret, &hello, &answer).unwrap()).unwrap();
        let error = zero.join().unwrap().unwrap_err().to_string();
        assert!(error.contains(&format!("version {}", VERSION + 7)) && error.contains("rank 1"), "{error}");
    });
}

#[test]
fn duplicate_ranks_are_errors_and_reconnecting_is_not() {
    let at = &free();
    std::thread::scope(|scope| {
        let join = |r| move || meet(&rank(r, 3, at), after(20.0)).map(drop);
        let ranks: Vec<_> = [0, 1, 1].into_iter().map(|r| scope.spawn(join(r))).collect();
        for rank in ranks {
            let error = rank.join().unwrap().unwrap_err().to_string();
            assert!(error.contains("two processes connected as rank 1"), "{error}");
        }
    });
    // One that has ended and was started again takes its place.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let job = LaunchEnv { secret: Some(Secret([5; 32])), ..rank(1, 3, "") };
    let place = || Ok(Place { address: listener.local_addr().unwrap(), secret: Secret([5; 32]) });
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| accept::all_ranks(&listener, 3, &Secret([5; 32]), after(20.0), &|| None));
        let first = connect::to_rank0(&job, place, after(0.5), &|| None);
        assert!(first.is_err(), "it gave up waiting for rank 2");
        scope.spawn(|| {
            connect::to_rank0(&LaunchEnv { rank: 2, ..job.clone() }, place, after(20.0), &|| None).unwrap()
        });
        scope.spawn(|| connect::to_rank0(&job, place, after(20.0), &|| None).unwrap());
        assert_eq!(zero.join().unwrap().unwrap().len(), 2);
    });
}

#[test]
fn another_secret_is_another_job() {
    let at = &free();
    std::thread::scope(|scope| {
        let with = |text: &str, r| LaunchEnv { secret: Some(Secret::from_text(text)), ..rank(r, 2, at) };
        let zero = scope.spawn({
            let job = with("a", 0);
            move || meet(&job, after(2.0)).unwrap_err().to_string()
        });
        let one = meet(&with("b", 1), after(1.0)).unwrap_err().to_string();
        assert!(one.contains("another job") && one.contains("FERROTRON_JOB_SECRET"), "{one}");
        assert!(zero.join().unwrap().contains("[1] did not connect"));
    });
}

#[test]
fn somebody_else_at_rank_0s_address_is_not_waited_for_long() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let job = LaunchEnv { secret: Some(Secret([1; 32])), ..rank(1, 2, &at) };
    let start = Instant::now();
    let error = meet(&job, after(1.0)).unwrap_err().to_string();
    assert!(error.contains("not as rank 0 of this job"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(3));
}

#[test]
fn values_of_the_store() {
    let store: SocketAddr = "10.0.0.9:29500".parse().unwrap();
    let value = |text: &str| [&[7; 32][..], text.as_bytes()].concat();
    let place = decode_place(&value("10.0.0.1:5"), store).unwrap();
    assert_eq!((place.address.to_string().as_str(), place.secret), ("10.0.0.1:5", Secret([7; 32])));
    let place = decode_place(&value("0.0.0.0:5"), store).unwrap();
    assert_eq!(place.address.to_string(), "10.0.0.9:5", "the store is on rank 0's host");
    for bad in [&b""[..], &[7; 31], &value(""), &value("x:5"), &value("10.0.0.1:99999"), &[255; 60]] {
        assert!(decode_place(bad, store).is_none(), "{bad:?}");
    }
}
