//! `watch` in a terminal, under tmux: sizes, keys, and the terminal as it was afterwards.

use super::run_log::RunLog;
use super::{binary, installed};
use ferrotron_core::events::Ending;
use std::process::Command;
use std::time::{Duration, Instant};

/// A tmux server of its own with one window.
struct Tmux {
    socket: String,
}

impl Tmux {
    fn new(dir: &std::path::Path, width: usize, height: usize) -> Tmux {
        let tmux = Tmux { socket: dir.join("tmux").to_string_lossy().into_owned() };
        let (x, y) = (width.to_string(), height.to_string());
        tmux.run(&["-f", "/dev/null", "new-session", "-d", "-x", &x, "-y", &y, "env PS1='prompt> ' ENV= sh"]);
        tmux.run(&["set-option", "-g", "window-size", "manual"]);
        tmux.wait_for("prompt>");
        tmux
    }

    fn run(&self, args: &[&str]) -> String {
        let out = Command::new("tmux").arg("-S").arg(&self.socket).args(args).output().unwrap();
        assert!(out.status.success(), "tmux {args:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    fn keys(&self, keys: &str) {
        self.run(&["send-keys", "-l", keys]);
    }

    fn line(&self, line: &str) {
        self.keys(line);
        self.run(&["send-keys", "Enter"]);
    }

    fn screen(&self) -> String {
        self.run(&["capture-pane", "-p"])
    }

    /// Waits until the screen satisfies a condition.
    fn wait(&self, what: &str, done: impl Fn(&str) -> bool) -> String {
        let start = Instant::now();
        loop {
            let screen = self.screen();
            if done(&screen) {
                return screen;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "no {what} on the screen:\n{screen}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn wait_for(&self, text: &str) -> String {
        self.wait(text, |screen| screen.contains(text))
    }

    /// Cursor shown, alternate screen, wrapping at the margin.
    fn flags(&self) -> String {
        self.run(&["display-message", "-p", "#{cursor_flag} #{alternate_on} #{wrap_flag}"]).trim().into()
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        drop(Command::new("tmux").arg("-S").arg(&self.socket).arg("kill-server").output());
    }
}

fn widest(screen: &str) -> usize {
    screen.lines().map(|l| l.chars().count()).max().unwrap_or(0)
}

#[test]
fn a_terminal_is_drawn_resized_and_left_as_it_was() {
    if !installed("tmux", "-V", "watch under tmux") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut a = RunLog::create(dir.path(), "alpha", 100);
    let mut b = RunLog::create(dir.path(), "beta\x1b[31m", 50);
    a.steps(20);
    b.steps(50);
    b.end(Ending::Finished, None);
    let tmux = Tmux::new(dir.path(), 80, 24);
    let cd = format!("cd {}; stty -a > before", dir.path().display());
    tmux.line(&cd);
    let watch = format!("{} watch .", binary().to_string_lossy());
    let before = tmux.flags();
    // Each way to end it leaves the terminal as it was.
    for way in ["q", "ctrl-c", "ctrl-z", "terminated"] {
        tmux.line("clear");
        tmux.line(&watch);
        let screen = tmux.wait("steps of both runs", |s| s.contains("20/100") && s.contains("50/50"));
        assert!(tmux.flags().starts_with("0 1"), "no cursor, alternate screen: {}", tmux.flags());
        for text in [
            "ferrotron watch",
            "alpha",
            "beta\u{fffd}[31m",
            "running",
            "finished",
            "loss",
            "tokens/s",
            "expert load",
        ] {
            assert!(screen.contains(text), "{text} is missing:\n{screen}");
        }
        assert!(screen.chars().any(|c| ('\u{2801}'..='\u{28ff}').contains(&c)), "no curve:\n{screen}");
        assert!(widest(&screen) <= 80 && screen.lines().count() <= 24, "{screen}");
        match way {
            "q" => tmux.keys("q"),
            "ctrl-c" => {
                tmux.run(&["send-keys", "C-c"]);
            }
            // Stopped, the terminal is the shell's; in the foreground again it is drawn anew.
            "ctrl-z" => {
                tmux.run(&["send-keys", "C-z"]);
                tmux.wait("the shell", |s| s.contains("Stopped") && !s.contains("ferrotron watch  "));
                assert_eq!(tmux.flags(), before, "{way}");
                tmux.line("fg");
                tmux.wait("steps of both runs", |s| s.contains("20/100") && s.contains("50/50"));
                assert!(tmux.flags().starts_with("0 1"), "no cursor, alternate screen: {}", tmux.flags());
                tmux.keys("q");
            }
            _ => {
                let pid = tmux.run(&["display-message", "-p", "#{pane_pid}"]);
                let children = format!("/proc/{0}/task/{0}/children", pid.trim());
                let child = std::fs::read_to_string(children).unwrap();
                assert!(Command::new("kill").arg(child.trim()).status().unwrap().success());
            }
        }
        tmux.wait("prompt", |s| {
            s.lines().rev().find(|l| !l.is_empty()).is_some_and(|l| l.starts_with("prompt>"))
        });
        assert_eq!(tmux.flags(), before, "{way}");
    }
    tmux.line("stty -a > after; echo written");
    tmux.wait("written", |s| s.contains("\nwritten"));
    let stty = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
    assert_eq!(stty("before"), stty("after"));
}

#[test]
fn a_large_terminal_shows_more_and_follows_the_run_to_its_death() {
    if !installed("tmux", "-V", "watch under tmux") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut run = RunLog::create(dir.path(), "alpha", 100);
    run.steps(10);
    let tmux = Tmux::new(dir.path(), 80, 24);
    tmux.line(&format!("{} watch {}", binary().to_string_lossy(), run.dir.display()));
    tmux.wait_for("10/100");
    assert!(!tmux.screen().contains("gradient norm"), "what does not fit comes with the arrow keys");
    tmux.run(&["send-keys", "Right", "Right"]);
    tmux.wait_for("gradient norm");
    tmux.run(&["resize-window", "-x", "200", "-y", "60"]);
    let screen = tmux.wait("all panels", |s| {
        ["gradient norm", "learning rate", "memory", "J/token", "expert load"].iter().all(|t| s.contains(t))
    });
    assert!(widest(&screen) > 150 && screen.lines().count() > 40, "{screen}");
    tmux.keys("l");
    tmux.wait_for("loss, log");
    tmux.keys("s");
    tmux.wait_for("smooth on");
    run.steps(1);
    tmux.wait_for("11/100");
    run.end(Ending::Failed, Some("rank 1 panicked: no memory"));
    tmux.wait("the end", |s| s.contains("failed: rank 1 panicked") && s.contains("failed"));
    for (x, y) in [("20", "5"), ("3", "2"), ("80", "24")] {
        tmux.run(&["resize-window", "-x", x, "-y", y]);
        std::thread::sleep(Duration::from_millis(300));
    }
    tmux.wait_for("11/100");
    tmux.keys("q");
    tmux.wait_for("prompt>");
}

#[test]
fn without_a_terminal_one_picture_is_printed() {
    let dir = tempfile::tempdir().unwrap();
    RunLog::create(dir.path(), "alpha", 100).steps(10);
    let watch = |args: &[&str]| {
        let out = Command::new(binary()).arg("watch").args(args).current_dir(dir.path()).output().unwrap();
        (out.status.code(), String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap())
    };
    let (code, out, _) = watch(&[".", "--once"]);
    assert!(code == Some(0) && out.contains("10/100") && out.contains("alpha"), "{out}");
    assert!(!out.contains('\x1b'), "{out:?}");
    // Numbers of two digits leave names whole.
    (0..11).for_each(|i| RunLog::create(&dir.path().join("many"), &format!("run{i:02}x"), 10).steps(1));
    let (_, out, _) = watch(&["many", "--once"]);
    assert!(out.contains("10 ● run10x"), "{out}");
    let (code, out, _) = watch(&["alpha", "--json"]);
    let summary: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &summary["runs"][0]["state"]), (Some(0), &serde_json::json!("running")));
    let (code, _, err) = watch(&["nowhere"]);
    assert!(code == Some(2) && err.contains("there is no run folder nowhere"), "{err}");
    let (code, _, err) = watch(&["--port", "1"]);
    assert!(code == Some(2) && err.contains("--web"), "{err}");
}
