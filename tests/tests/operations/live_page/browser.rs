//! A Chromium that a test drives through chromedriver, by the W3C's WebDriver protocol
//! (<https://www.w3.org/TR/webdriver2/>) and Chromium's own commands.

use std::io::{BufRead as _, BufReader};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use splitrail_tests::Client;
use splitrail_tests::cluster::eventually;
use tempfile::TempDir;

/// Switches for a browser without a screen, that calls nobody but the page's router.
const SWITCHES: [&str; 8] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
];

/// How often the driver is started. It takes a port that is free for one version of IP, and ends if
/// somebody has it for the other.
const STARTS_MAX: usize = 5;

/// A browser with one window. Dropping it ends it.
pub(crate) struct Browser {
    driver: Child,
    client: Client,
    session: String,
    profile: TempDir,
}

/// What a user has chosen: the size of the window, and the colour scheme.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Screen {
    /// Width in CSS pixels.
    pub(crate) width: u32,
    /// Height in CSS pixels.
    pub(crate) height: u32,
    /// Whether the user prefers dark pages.
    pub(crate) dark: bool,
}

impl Screen {
    /// A desktop's window.
    pub(crate) const DESKTOP: Self = Self { width: 1440, height: 900, dark: false };
}

/// A program of Debian's packages `chromium` and `chromium-driver`, or where `variable` says.
fn program(variable: &str, usual: &str) -> PathBuf {
    let path = std::env::var_os(variable).map_or_else(|| PathBuf::from(usual), PathBuf::from);
    assert!(
        path.is_file(),
        "{} is missing: install Debian's packages chromium and chromium-driver, or set {variable}",
        path.display()
    );
    path
}

/// Starts the driver, which says its port; `None` if it ends without one.
fn start_driver() -> Option<(Child, u16)> {
    let mut driver = Command::new(program("CHROMEDRIVER", "/usr/bin/chromedriver"))
        .arg("--port=0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("chromedriver");
    let said = BufReader::new(driver.stdout.take().expect("its output"));
    let port = said.lines().map_while(Result::ok).find_map(|line| {
        let (_, port) = line.split_once("started successfully on port ")?;
        port.trim_end_matches('.').parse().ok()
    });
    match port {
        Some(port) => Some((driver, port)),
        None => {
            let _ended = driver.wait();
            None
        }
    }
}

impl Browser {
    /// Starts a browser with an empty profile.
    pub(crate) async fn start() -> Self {
        let (driver, port) = (0..STARTS_MAX).find_map(|_| start_driver()).expect("a port");
        let client = Client::new((Ipv4Addr::LOCALHOST, port).into());
        let profile = tempfile::tempdir().expect("a profile");
        let mut browser = Self { driver, client, session: String::new(), profile };
        let folder = format!("--user-data-dir={}", browser.profile.path().display());
        let switches: Vec<&str> = SWITCHES.into_iter().chain([&*folder]).collect();
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL"},
            "goog:chromeOptions": {
                "binary": program("CHROMIUM", "/usr/bin/chromium"),
                "args": switches,
            },
        }}});
        let session = browser.post("/session", &wanted).await;
        browser.session = session["sessionId"].as_str().expect("a session").to_owned();
        browser
    }

    async fn post(&self, path: &str, body: &Value) -> Value {
        let reply = self.client.post(path, body).await;
        let value = reply.json()["value"].take();
        assert_eq!(reply.status, 200, "{path}: {value}");
        value
    }

    async fn call(&self, command: &str, body: &Value) -> Value {
        self.post(&format!("/session/{}/{command}", self.session), body).await
    }

    /// One of Chromium's own commands
    /// (<https://chromedevtools.github.io/devtools-protocol/>).
    pub(crate) async fn command(&self, name: &str, parameters: Value) -> Value {
        self.call("goog/cdp/execute", &json!({"cmd": name, "params": parameters})).await
    }

    /// Sets the screen.
    pub(crate) async fn set_screen(&self, screen: Screen) {
        let Screen { width, height, dark } = screen;
        let size =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.command("Emulation.setDeviceMetricsOverride", size).await;
        let scheme = if dark { "dark" } else { "light" };
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.command("Emulation.setEmulatedMedia", media).await;
    }

    /// Opens a page.
    pub(crate) async fn open(&self, url: &str) {
        self.call("url", &json!({ "url": url })).await;
    }

    /// Runs a function's body in the page, as a debugger would; returns what it returns.
    pub(crate) async fn run(&self, script: &str) -> Value {
        self.call("execute/sync", &json!({"script": script, "args": []})).await
    }

    /// The visible text of the elements that a CSS selector finds.
    pub(crate) async fn texts(&self, selector: &str) -> Vec<String> {
        let selector = Value::from(selector);
        let script = format!(
            "return [...document.querySelectorAll({selector})] \
             .filter((node) => node.checkVisibility()).map((node) => node.innerText)"
        );
        let texts = self.run(&script).await;
        texts.as_array().expect("a list").iter().map(text).collect()
    }

    /// Waits until an element that a selector finds has a text in it.
    pub(crate) async fn shows(&self, selector: &str, wanted: &str) {
        let what = format!("{selector} shows {wanted:?}");
        eventually(&what, async || {
            self.texts(selector).await.iter().any(|text| text.contains(wanted))
        })
        .await;
    }

    /// Clicks the first element that a selector finds.
    pub(crate) async fn click(&self, selector: &str) {
        self.run(&format!("document.querySelector({}).click()", Value::from(selector))).await;
    }

    /// What the page has logged, and the browser about the page, since the last call.
    pub(crate) async fn log(&self) -> Vec<String> {
        let log = self.call("se/log", &json!({"type": "browser"})).await;
        log.as_array().expect("a log").iter().map(|entry| text(&entry["message"])).collect()
    }

    /// Writes what the window shows to a PNG, the whole page if it is not longer than `max`
    /// pixels.
    pub(crate) async fn screenshot(&self, path: &Path, max: u32) {
        let rect =
            self.run("const e = document.documentElement; return [innerWidth, e.scrollHeight]");
        let rect = rect.await;
        let height = rect[1].as_u64().unwrap_or(0).min(max.into());
        self.write(path, json!({"x": 0, "y": 0, "width": rect[0], "height": height})).await;
    }

    /// Writes the rectangle around all elements of a selector to a PNG.
    pub(crate) async fn screenshot_of(&self, selector: &str, path: &Path) {
        let around = format!(
            "const boxes = [...document.querySelectorAll({selector:?})].map((e) => e.getBoundingClientRect());
             const [left, top] = ['left', 'top'].map((side) => Math.min(...boxes.map((box) => box[side])));
             const [right, end] = ['right', 'bottom'].map((side) => Math.max(...boxes.map((box) => box[side])));
             const [x, y] = [left + scrollX - 8, top + scrollY - 8];
             return {{ x, y, width: right - left + 16, height: end - top + 16 }}"
        );
        let clip = self.run(&around).await;
        self.write(path, clip).await;
    }

    async fn write(&self, path: &Path, mut clip: Value) {
        clip["scale"] = 1.into();
        let shown = json!({"format": "png", "clip": clip, "captureBeyondViewport": true});
        let shot = self.command("Page.captureScreenshot", shown).await;
        let png = STANDARD.decode(shot["data"].as_str().expect("a picture")).expect("base64");
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(path, png).expect("a file");
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The driver ends its browsers only if it is asked to, which a panic does not do.
        let _gone = self.driver.kill();
        let _gone = self.driver.wait();
        let profile = self.profile.path().display().to_string();
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|pid| pid.parse::<u32>().ok())
            else {
                continue;
            };
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains(&profile) {
                // It may have ended with another of the browser's processes.
                let _gone = Command::new("kill").args(["-KILL", &pid.to_string()]).output();
            }
        }
    }
}
