//! Headless Chromium, driven by the DevTools protocol over a pipe.

use super::Ends;
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Names under which it is installed.
const PROGRAMS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
/// Time for an answer of the browser; none needs a tenth of it.
const LIMIT: Duration = Duration::from_secs(120);

/// The browser that is installed. CI requires one; elsewhere the test prints that it is skipped.
pub fn program(test: &str) -> Option<&'static str> {
    let works = |name: &&&str| Command::new(name).arg("--version").output().is_ok();
    let found = PROGRAMS.iter().find(works).copied();
    if found.is_none() {
        assert!(std::env::var_os("CI").is_none(), "CI needs Chromium (apt-get install chromium)");
        eprintln!("SKIPPED: {test}: no Chromium is installed");
    }
    found
}

/// A browser with one page.
pub struct Browser {
    _process: Ends,
    commands: File,
    answers: Receiver<Value>,
    session: Option<String>,
    id: u64,
    /// What the page complained about: exceptions, console errors, violations of its security policy.
    pub complaints: Vec<String>,
}

impl Browser {
    pub fn start(program: &str, dir: &Path) -> Browser {
        let [input, output] = ["commands", "answers"].map(|name| dir.join(name));
        for pipe in [&input, &output] {
            assert!(Command::new("mkfifo").arg(pipe).status().unwrap().success());
        }
        // The browser reads commands from descriptor 3 and answers on 4.
        let child = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<\"$COMMANDS\" 4>\"$ANSWERS\"", program])
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
            ])
            .args(["--hide-scrollbars", "--remote-debugging-pipe", "about:blank"])
            .arg(format!("--user-data-dir={}", dir.join("profile").display()))
            .env("COMMANDS", &input)
            .env("ANSWERS", &output)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let process = Ends(child);
        let commands = OpenOptions::new().write(true).open(&input).unwrap();
        let (sender, answers) = channel();
        let read = move || {
            for message in BufReader::new(File::open(&output).unwrap()).split(0) {
                let Ok(message) = message else { break };
                if sender.send(serde_json::from_slice(&message).unwrap()).is_err() {
                    break;
                }
            }
        };
        std::thread::spawn(read);
        let mut browser =
            Browser { _process: process, commands, answers, session: None, id: 0, complaints: Vec::new() };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attached = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", attached);
        browser.session = Some(session["sessionId"].as_str().unwrap().into());
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, json!({}));
        }
        browser
    }

    /// Calls a method and returns its result.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.id += 1;
        let mut command = json!({ "id": self.id, "method": method, "params": params });
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        let mut text = serde_json::to_vec(&command).unwrap();
        text.push(0);
        self.commands.write_all(&text).unwrap();
        loop {
            let answer = self.answers.recv_timeout(LIMIT).unwrap_or_else(|e| panic!("{method}: {e}"));
            if answer["id"] == json!(self.id) {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
            let entry = &answer["params"];
            let bad = match answer["method"].as_str() {
                Some("Runtime.exceptionThrown") => true,
                Some("Runtime.consoleAPICalled") => entry["type"] == "error",
                Some("Log.entryAdded") => entry["entry"]["level"] == "error",
                _ => false,
            };
            if bad {
                self.complaints.push(entry.to_string());
            }
        }
    }

    /// The value of an expression in the page.
    pub fn eval(&mut self, expression: &str) -> Value {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let result = self.call("Runtime.evaluate", params);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true and returns the time it took.
    pub fn wait(&mut self, expression: &str) -> Duration {
        let start = Instant::now();
        while self.eval(expression) != json!(true) {
            assert!(start.elapsed() < LIMIT, "{expression} is never true; {:?}", self.complaints);
            std::thread::sleep(Duration::from_millis(20));
        }
        start.elapsed()
    }

    /// Opens a page at a size, in the dark or light scheme of the system.
    pub fn open(&mut self, url: &str, width: u32, height: u32, scheme: &str) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.call("Emulation.setDeviceMetricsOverride", size);
        let feature = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.call("Emulation.setEmulatedMedia", feature);
        self.call("Page.navigate", json!({ "url": url }));
    }

    /// Bytes of a PNG of what is visible.
    pub fn screenshot(&mut self) -> usize {
        let shot = self.call("Page.captureScreenshot", json!({ "format": "png" }));
        shot["data"].as_str().unwrap().len() * 3 / 4
    }
}
