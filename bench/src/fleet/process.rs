//! Processes of the built programs, and what the system knows of them.

use std::fs;
use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};

use super::Failure;

/// Ports that are tried before it is given up.
const PORTS_TRIED: usize = 100;

/// Set where processes count how often their code runs (`release/build`): they write that down as
/// they end by themselves.
const COUNTS: &str = "LLVM_PROFILE_FILE";
/// How long one may take for it.
const ENDING: Duration = Duration::from_secs(10);

/// A child process. Dropping it kills it.
pub(crate) struct Process {
    child: Child,
    name: String,
}

impl Process {
    /// Starts a program; what it logs (`RUST_LOG`) goes to `NAME.log` in a folder.
    ///
    /// # Errors
    /// If it cannot be started, most likely because nobody has built it.
    pub(crate) fn start(
        program: &Path,
        name: &str,
        folder: &Path,
        args: &[&str],
        logs: &str,
    ) -> Result<Self, Failure> {
        Self::start_in(program, name, folder, args, &[("RUST_LOG", logs)])
    }

    /// The same with any variables of its environment.
    ///
    /// # Errors
    /// As [`Process::start`].
    pub(crate) fn start_in(
        program: &Path,
        name: &str,
        folder: &Path,
        args: &[&str],
        variables: &[(&str, &str)],
    ) -> Result<Self, Failure> {
        let log = File::create(folder.join(format!("{name}.log")))?;
        let child = Command::new(program)
            .args(args)
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        let child = child.map_err(|error| {
            let hint = "`cargo build --release` in the root folder builds it";
            format!("{}: {error}; {hint}", program.display())
        })?;
        Ok(Self { child, name: name.to_owned() })
    }

    /// SIGKILL, and waits for the end.
    pub(crate) fn kill(&mut self) {
        // It may have ended by itself.
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }

    /// SIGTERM, and waits for the end.
    fn end(&mut self) {
        let Some(id) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) else { return };
        let since = Instant::now();
        let asked =
            matches!(self.child.try_wait(), Ok(None)) && kill_process(id, Signal::TERM).is_ok();
        while asked && matches!(self.child.try_wait(), Ok(None)) && since.elapsed() < ENDING {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Fails if it has ended.
    pub(crate) fn check(&mut self, folder: &Path) -> Result<(), Failure> {
        let Some(status) = self.child.try_wait()? else { return Ok(()) };
        let log = fs::read_to_string(folder.join(format!("{}.log", self.name)));
        Err(format!("{} has ended: {status}\n{}", self.name, log.unwrap_or_default()).into())
    }

    /// Processor time so far, of all its threads.
    ///
    /// # Errors
    /// Where `/proc` does not tell.
    pub(crate) fn cpu(&self) -> Result<Duration, Failure> {
        cpu_of(&self.child.id().to_string())
    }

    /// Its process, and those that it has started.
    ///
    /// # Errors
    /// Where `/proc` does not tell.
    pub(crate) fn family(&self) -> Result<Vec<u32>, Failure> {
        let id = self.child.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
        let children = children.split_whitespace().filter_map(|child| child.parse().ok());
        Ok(std::iter::once(id).chain(children).collect())
    }

    /// Resident memory now of it and of the processes that it has started, in MB (10^6 bytes).
    ///
    /// # Errors
    /// Where `/proc` does not tell.
    pub(crate) fn family_mb(&self) -> Result<f64, Failure> {
        self.family()?.into_iter().map(|id| resident_mb_of(id, Resident::Now)).sum()
    }

    /// Resident memory in MB (10^6 bytes): the most so far, or now.
    ///
    /// # Errors
    /// Where `/proc` does not tell.
    pub(crate) fn resident_mb(&self, which: Resident) -> Result<f64, Failure> {
        resident_mb_of(self.child.id(), which)
    }
}

/// Processor time of a process so far, as user and in the system.
///
/// # Errors
/// Where `/proc` does not tell: the process is gone.
pub(crate) fn cpu_parts_of(process: &str) -> Result<(Duration, Duration), Failure> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name before it may hold anything.
    let behind = stat.rsplit_once(')').ok_or("no name in /proc/PID/stat")?.1;
    let field = |at: usize| -> Result<u64, Failure> {
        Ok(behind.split_whitespace().nth(at).ok_or("too few fields")?.parse()?)
    };
    // The fields 14 and 15 of proc(5), of which two stand before.
    Ok((ticks(field(11)?), ticks(field(12)?)))
}

/// Processor time so far of a process, named as in `/proc`, and of all its threads.
///
/// # Errors
/// Where `/proc` does not tell.
pub(crate) fn cpu_of(process: &str) -> Result<Duration, Failure> {
    let (user, system) = cpu_parts_of(process)?;
    Ok(user + system)
}

/// Processor time of the whole system so far, idle time left out.
///
/// # Errors
/// Where `/proc` does not tell.
pub(crate) fn cpu_of_all() -> Result<Duration, Failure> {
    let stat = fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().ok_or("an empty /proc/stat")?;
    let times: Vec<u64> = line.split_whitespace().filter_map(|time| time.parse().ok()).collect();
    // user, nice, system, (idle, iowait,) irq, softirq, steal.
    let busy = times.iter().enumerate().take(8).filter(|(at, _)| !matches!(at, 3 | 4));
    Ok(ticks(busy.map(|(_, time)| time).sum()))
}

fn ticks(count: u64) -> Duration {
    Duration::from_secs_f64(count as f64 / clock_ticks_per_second() as f64)
}

/// Resident memory of a process in MB (10^6 bytes).
///
/// # Errors
/// Where `/proc` does not tell.
pub(crate) fn resident_mb_of(process: u32, which: Resident) -> Result<f64, Failure> {
    let key = match which {
        Resident::Peak => "VmHWM:",
        Resident::Now => "VmRSS:",
    };
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(key)).ok_or("no memory")?;
    let kib: f64 = line.split_whitespace().next().ok_or("no figure")?.parse()?;
    Ok(kib * 1024.0 / 1e6)
}

/// Which resident memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Resident {
    /// The most so far.
    Peak,
    /// Now.
    Now,
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::env::var_os(COUNTS).is_some() {
            self.end();
        }
        self.kill();
    }
}

/// Ports that nobody has, below those that connections get: while a router is gone, none of the
/// many that try to reach it is given its port.
///
/// # Errors
/// If there are none.
pub(crate) fn free_ports<const N: usize>() -> Result<[SocketAddr; N], Failure> {
    let any = || SocketAddr::from(([127, 0, 0, 1], rand::random_range(20_000..30_000)));
    let bound = (0..PORTS_TRIED).filter_map(|_| TcpListener::bind(any()).ok());
    let held: Vec<TcpListener> = bound.take(N).collect();
    let mut addresses = [SocketAddr::from(([127, 0, 0, 1], 0)); N];
    if held.len() < N {
        return Err("no free ports".into());
    }
    for (address, listener) in addresses.iter_mut().zip(&held) {
        *address = listener.local_addr()?;
    }
    Ok(addresses)
}

/// Thousands of connections are open at once.
///
/// # Errors
/// If the system refuses.
pub(crate) fn allow_many_files() -> Result<(), Failure> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    Ok(())
}

/// Of the last minute, five and fifteen.
pub(crate) fn load_average() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}
