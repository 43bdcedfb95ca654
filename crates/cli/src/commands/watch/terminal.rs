//! The terminal in raw mode on its alternate screen, and always back as it was.
//!
//! [`Terminal`] restores it when dropped, a panic hook before the message of a panic, and signals that end the program do so by
//! ending the loop that owns it. The calls of the C library that raw mode needs are here and nowhere else.
#![allow(unsafe_code)]

use anyhow::{Result, bail};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGTERM, SIGTSTP, SIGWINCH};
use signal_hook::flag;
use std::io::{IsTerminal, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The alternate screen, no cursor, no wrapping.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
/// The reverse.
const LEAVE: &str = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l";

/// Size where the terminal does not tell.
const FALLBACK: (usize, usize) = (80, 24);
/// Largest size that is drawn.
const LARGEST: usize = 1000;

/// What the user does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// A key, by its byte.
    Key(u8),
    /// An arrow key to the left or right.
    Left,
    Right,
    /// The size has changed, or the screen must be drawn anew.
    Redraw,
    /// End: Ctrl-C or a signal.
    Quit,
    /// Nothing in the time given.
    Nothing,
}

/// The settings to restore; none while they are.
type Saved = Arc<Mutex<Option<libc::termios>>>;

/// A terminal in raw mode.
pub struct Terminal {
    saved: Saved,
    keys: Receiver<u8>,
    quit: Arc<AtomicBool>,
    resized: Arc<AtomicBool>,
}

impl Terminal {
    /// Takes over the terminal of standard input and output.
    pub fn enter() -> Result<Terminal> {
        if !(std::io::stdin().is_terminal() && std::io::stdout().is_terminal()) {
            bail!("standard input and output are not a terminal");
        }
        let (quit, resized) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            flag::register(signal, Arc::clone(&quit))?;
        }
        for signal in [SIGWINCH, SIGCONT] {
            flag::register(signal, Arc::clone(&resized))?;
        }
        let saved: Saved = Arc::new(Mutex::new(None));
        let for_panics = Arc::clone(&saved);
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore(&for_panics);
            hook(info);
        }));
        let (sender, keys) = channel();
        let read = move || {
            for byte in std::io::stdin().lock().bytes() {
                let Ok(byte) = byte else { break };
                if sender.send(byte).is_err() {
                    break;
                }
            }
        };
        begin(&saved)?;
        let terminal = Terminal { saved, keys, quit, resized };
        std::thread::Builder::new().name("keys".into()).spawn(read)?;
        Ok(terminal)
    }

    /// Waits up to `time` for something to happen.
    pub fn wait(&self, time: Duration) -> Input {
        let until = Instant::now() + time;
        loop {
            if self.quit.load(Ordering::Relaxed) {
                return Input::Quit;
            }
            if self.resized.swap(false, Ordering::Relaxed) {
                return Input::Redraw;
            }
            let left = until.saturating_duration_since(Instant::now());
            match self.keys.recv_timeout(left.min(Duration::from_millis(50))) {
                Ok(3) => return Input::Quit, // Ctrl-C
                Ok(26) => self.suspend(),    // Ctrl-Z
                Ok(27) => return self.escape(),
                Ok(key) => return Input::Key(key),
                // Standard input has ended: the terminal is gone.
                Err(RecvTimeoutError::Disconnected) => return Input::Quit,
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Input::Nothing,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// The rest of an escape sequence, or the escape key itself.
    fn escape(&self) -> Input {
        let next = || self.keys.recv_timeout(Duration::from_millis(20)).ok();
        match next() {
            Some(b'[' | b'O') => match next() {
                Some(b'D') => Input::Left,
                Some(b'C') => Input::Right,
                _ => Input::Nothing,
            },
            Some(_) => Input::Nothing,
            None => Input::Key(27),
        }
    }

    /// Stops the process as Ctrl-Z does elsewhere, the terminal as it was meanwhile.
    fn suspend(&self) {
        restore(&self.saved);
        // Nothing is lost if it cannot be stopped: the screen is drawn again.
        drop(signal_hook::low_level::emulate_default_handler(SIGTSTP));
        drop(begin(&self.saved));
        self.resized.store(true, Ordering::Relaxed);
    }

    /// Writes escape sequences and text.
    pub fn write(&self, text: &str) -> Result<()> {
        let mut out = std::io::stdout().lock();
        Ok(out.write_all(text.as_bytes()).and_then(|()| out.flush())?)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        restore(&self.saved);
    }
}

/// Columns and rows of the terminal.
pub fn size() -> (usize, usize) {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCGWINSZ writes one winsize, which lives until the call has returned.
    let ok = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &mut size) } == 0;
    let known = |n: u16, otherwise: usize| if ok && n > 0 { usize::from(n).min(LARGEST) } else { otherwise };
    (known(size.ws_col, FALLBACK.0), known(size.ws_row, FALLBACK.1))
}

/// Raw mode and the alternate screen; keeps the settings before.
fn begin(saved: &Saved) -> Result<()> {
    // SAFETY: termios is plain data for which all zeros are valid; tcgetattr fills it.
    let mut settings: libc::termios = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live termios.
    if unsafe { libc::tcgetattr(libc::STDIN_FILENO, &mut settings) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    let mut raw = settings;
    // SAFETY: both calls take a pointer to a live termios that tcgetattr has filled.
    let set = unsafe {
        libc::cfmakeraw(&mut raw);
        libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &raw)
    };
    if set != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    *saved.lock().unwrap_or_else(PoisonError::into_inner) = Some(settings);
    let mut out = std::io::stdout().lock();
    Ok(out.write_all(ENTER.as_bytes()).and_then(|()| out.flush())?)
}

/// The terminal as it was; does nothing if it is already.
fn restore(saved: &Saved) {
    let Some(settings) = saved.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
    let mut out = std::io::stdout().lock();
    // A terminal that is gone needs nothing.
    drop(out.write_all(LEAVE.as_bytes()).and_then(|()| out.flush()));
    // SAFETY: the settings are those that tcgetattr gave.
    unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSADRAIN, &settings) };
}
