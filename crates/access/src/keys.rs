//! API keys: the table of their hashes, which follows the file, and new keys.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom as _, SystemRandom};
use splitrail_config::Problems;
use splitrail_config::keys::{self, KeyEntry, OperatorRole};
use splitrail_settings::secret::is_same;

use crate::file_state::{FileState, file_state};
use crate::refusal::Refusal;

/// The beginning of each key, by which people and scanners of leaked secrets recognise it.
const PREFIX: &str = "sr-";
/// Random bytes of a key.
const KEY_BYTES: usize = 32;
/// Random bytes of the id of a key.
const ID_BYTES: usize = 4;

/// The holder of a valid key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyHolder {
    /// The id of the key.
    pub id: Arc<str>,
    /// What the key is for.
    pub grant: Grant,
}

/// What a key is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grant {
    /// Requests of the tenant with this name.
    Tenant(Arc<str>),
    /// The admin listener.
    Role(OperatorRole),
}

/// The keys of one file, kept up to date with it.
pub struct KeySource {
    file: PathBuf,
    table: ArcSwap<Table>,
    /// The state of the file that was read last, whether its keys could be used or not; `None` if
    /// there was no file.
    state: Mutex<Option<FileState>>,
    /// Whether the keys in use are those of that state.
    is_current: AtomicBool,
    /// The read of the file that has not ended.
    reading: Mutex<Option<OpenRead>>,
}

/// Time after which a read of a file counts as one that may not end.
const READ_MAX: Duration = Duration::from_secs(5);

struct OpenRead {
    began: Instant,
    /// Whether it was logged that it does not end.
    is_reported: bool,
}

impl OpenRead {
    fn is_late(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.began) >= READ_MAX
    }
}

/// Marks a read of a file as ended when it is dropped.
struct ReadEnd<'a>(&'a KeySource);

impl Drop for ReadEnd<'_> {
    fn drop(&mut self) {
        *self.0.reading() = None;
    }
}

/// The keys that a file contained when it was read.
///
/// Which entries a search looks at depends on the first eight bytes of the hash of the given key.
/// This reveals nothing: who knows a part of the hash of a random key cannot find the key.
struct Table {
    /// The first eight bytes of the hashes of `keys`, as numbers in ascending order.
    beginnings: Vec<u64>,
    /// The keys, in the same order.
    keys: Vec<Key>,
}

struct Key {
    digest: [u8; 32],
    expires: Option<SystemTime>,
    holder: KeyHolder,
    /// When a request last came with the key after its end, in seconds since 1970; 0 if none has.
    used_expired_unix_s: AtomicU64,
}

fn unix_s(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl KeySource {
    /// Reads a file of keys for the first time.
    ///
    /// # Errors
    /// All mistakes in the file.
    pub fn open(file: &Path) -> Result<Self, Problems> {
        // Before the file itself: a change in between is noticed the next time.
        let state = Mutex::new(file_state(file));
        let table = ArcSwap::from_pointee(Table::read(file)?);
        let (file, is_current) = (file.to_owned(), AtomicBool::new(true));
        Ok(Self { file, table, state, is_current, reading: Mutex::default() })
    }

    /// The path of the file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Whether the keys in use are those of the file; `false` if the file cannot be used, or a read
    /// of it does not end.
    pub fn is_current(&self, now: Instant) -> bool {
        let is_stuck = self.reading().as_ref().is_some_and(|read| read.is_late(now));
        self.is_current.load(Relaxed) && !is_stuck
    }

    /// A read of the file, which may block its thread for as long as the file system takes; `None`
    /// if the read before has not ended. It is logged once that a read does not end.
    pub fn due_read(self: &Arc<Self>, now: Instant) -> Option<impl FnOnce() + Send + use<>> {
        let mut reading = self.reading();
        match &mut *reading {
            Some(read) => {
                if read.is_late(now) && !std::mem::replace(&mut read.is_reported, true) {
                    tracing::error!(
                        file = %self.file.display(),
                        "reading the file of API keys does not end: its previous keys stay valid"
                    );
                }
                None
            }
            None => {
                *reading = Some(OpenRead { began: now, is_reported: false });
                let source = Arc::clone(self);
                Some(move || {
                    let _end = ReadEnd(&source);
                    source.refresh();
                })
            }
        }
    }

    fn reading(&self) -> MutexGuard<'_, Option<OpenRead>> {
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The holder of a key. The time does not depend on how much of a hash is right, nor on whether
    /// the key is accepted.
    ///
    /// # Errors
    /// The key is not in the file, or has expired.
    pub fn holder(&self, key: &str, now: SystemTime) -> Result<KeyHolder, Refusal> {
        let table = self.table.load();
        let Some((nearest, is_same)) = table.nearest(&sha256(key)) else {
            return Err(Refusal::Unknown);
        };
        // Copied for a wrong key as well, so that a wrong key takes as long as a valid one.
        let holder = black_box(nearest.holder.clone());
        let has_expired = nearest.expires.is_some_and(|expires| expires <= now);
        match (is_same, has_expired) {
            (false, _) => Err(Refusal::Unknown),
            (true, true) => {
                nearest.used_expired_unix_s.store(unix_s(now), Relaxed);
                Err(Refusal::Expired)
            }
            (true, false) => Ok(holder),
        }
    }

    /// The holders of the keys that have expired at this time.
    pub fn expired(&self, at: SystemTime) -> Vec<KeyHolder> {
        let table = self.table.load();
        let expired = |key: &&Key| key.expires.is_some_and(|expires| expires <= at);
        table.keys.iter().filter(expired).map(|key| key.holder.clone()).collect()
    }

    /// The holders of expired keys with which requests have come since this time.
    pub fn expired_and_used(&self, since: SystemTime) -> Vec<KeyHolder> {
        let table = self.table.load();
        let used = |key: &&Key| key.used_expired_unix_s.load(Relaxed) >= unix_s(since);
        table.keys.iter().filter(used).map(|key| key.holder.clone()).collect()
    }

    /// Reads the file again if it has changed or could not be used before. If it cannot be used, its
    /// previous keys stay valid, and the error is logged once for each state of the file.
    pub fn refresh(&self) {
        let now = file_state(&self.file);
        let before = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *state, now)
        };
        let is_new = now != before;
        if !is_new && self.is_current.load(Relaxed) {
            return;
        }
        let file = self.file.display();
        let read = Table::read(&self.file);
        self.is_current.store(read.is_ok(), Relaxed);
        match read {
            Ok(next) => {
                let keys = next.keys.len();
                tracing::info!(%file, keys, "the file of API keys has changed and is in use");
                self.table.store(Arc::new(next));
            }
            Err(problems) if is_new => {
                let problem = problems.as_slice().first().map(|first| first.message.as_str());
                tracing::error!(
                    %file,
                    problem,
                    "the file of API keys cannot be used: its previous keys stay valid"
                );
            }
            Err(_) => {}
        }
    }
}

impl Table {
    fn read(file: &Path) -> Result<Self, Problems> {
        let entries = keys::load(file)?.keys;
        let mut keys: Vec<Key> = entries.iter().filter_map(Key::new).collect();
        keys.sort_by_key(|key| beginning(&key.digest));
        let beginnings = keys.iter().map(|key| beginning(&key.digest)).collect();
        Ok(Self { beginnings, keys })
    }

    /// The key with this hash and `true`, or any other key and `false`; `None` if there are no keys.
    /// At least one hash is compared in either case; more than one only if hashes begin alike.
    fn nearest(&self, digest: &[u8; 32]) -> Option<(&Key, bool)> {
        let last = self.keys.len().checked_sub(1)?;
        let wanted = beginning(digest);
        let mut place = self.beginnings.partition_point(|other| *other < wanted).min(last);
        loop {
            let key = &self.keys[place];
            let is_same = is_same(&key.digest, digest);
            place += 1;
            if is_same || self.beginnings.get(place) != Some(&wanted) {
                return Some((key, is_same));
            }
        }
    }
}

impl Key {
    fn new(entry: &KeyEntry) -> Option<Self> {
        let grant = match (&entry.tenant, entry.role) {
            (Some(tenant), None) => Grant::Tenant(tenant.as_str().into()),
            (None, Some(role)) => Grant::Role(role),
            // The checks of the file exclude both.
            _ => return None,
        };
        let holder = KeyHolder { id: entry.id.as_str().into(), grant };
        let (digest, expires) = (entry.digest()?, entry.expires_at());
        Some(Self { digest, expires, holder, used_expired_unix_s: AtomicU64::new(0) })
    }
}

fn beginning(digest: &[u8; 32]) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    u64::from_le_bytes(first)
}

fn sha256(text: &str) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest(&SHA256, text.as_bytes()).as_ref());
    bytes
}

/// A new random key, and its entry for the file. The key cannot be found again from the entry.
///
/// # Errors
/// The system has no random numbers.
pub fn generate(
    grant: &Grant,
    expires: Option<String>,
    note: Option<String>,
    now: SystemTime,
) -> std::io::Result<(String, KeyEntry)> {
    let mut random = [0; KEY_BYTES + ID_BYTES];
    fill(&mut random)?;
    let (secret, id) = random.split_at(KEY_BYTES);
    let key = format!("{PREFIX}{}", hex(secret));
    let (tenant, role) = match grant {
        Grant::Tenant(name) => (Some(name.to_string()), None),
        Grant::Role(role) => (None, Some(*role)),
    };
    let created = Some(humantime::format_rfc3339_seconds(now).to_string());
    let entry = KeyEntry {
        id: format!("k-{}", hex(id)),
        tenant,
        role,
        sha256: hex(&sha256(&key)),
        created,
        expires,
        note,
    };
    Ok((key, entry))
}

fn fill(random: &mut [u8]) -> std::io::Result<()> {
    let filled = SystemRandom::new().fill(random);
    filled.map_err(|_| std::io::Error::other("the system has no random numbers"))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use super::*;

    struct File(tempfile::TempDir);

    impl File {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn path(&self) -> PathBuf {
            self.0.path().join("keys.yaml")
        }

        fn write(&self, keys: &[&KeyEntry]) {
            let text = serde_json::json!({ "keys": keys }).to_string();
            std::fs::write(self.path(), text).unwrap();
        }
    }

    fn tenant_key(tenant: &str, expires: Option<&str>) -> (String, KeyEntry) {
        let expires = expires.map(str::to_owned);
        generate(&Grant::Tenant(tenant.into()), expires, None, SystemTime::now()).unwrap()
    }

    #[test]
    fn a_new_key_is_accepted_with_its_entry_and_no_other_text_is() {
        let file = File::new();
        let (acme, acme_entry) = tenant_key("acme", None);
        let (admin, admin_entry) =
            generate(&Grant::Role(OperatorRole::Admin), None, None, SystemTime::now()).unwrap();
        file.write(&[&acme_entry, &admin_entry]);
        let source = KeySource::open(&file.path()).unwrap();
        let holder = |key: &str| source.holder(key, SystemTime::now()).map(|holder| holder.grant);
        assert_eq!(holder(&acme), Ok(Grant::Tenant("acme".into())));
        assert_eq!(holder(&admin), Ok(Grant::Role(OperatorRole::Admin)));
        for other in ["", "sr-", &acme[1..], &acme_entry.sha256, &format!("{acme}0")] {
            assert_eq!(holder(other), Err(Refusal::Unknown), "{other}");
        }
        assert!(!serde_json::to_string(&acme_entry).unwrap().contains(&acme[3..]));
    }

    #[test]
    fn keys_with_similar_hashes_are_distinguished() {
        let file = File::new();
        let (key, entry) = tenant_key("acme", None);
        // Hashes that differ from that of the key in their last digit, or in all after the first 16.
        let (start, last) = entry.sha256.split_at(63);
        let near = [
            format!("{start}{}", if last == "0" { "1" } else { "0" }),
            format!("{}{}", &start[..16], "0".repeat(48)),
            format!("{}{}", &start[..16], "f".repeat(48)),
        ];
        let near = near.map(|sha256| {
            let id = format!("k-{}", &sha256[56..]);
            KeyEntry { id, sha256, tenant: Some("other".to_owned()), ..entry.clone() }
        });
        let [a, b, c] = near.each_ref();
        let holder = |entries: &[&KeyEntry]| {
            file.write(entries);
            let source = KeySource::open(&file.path()).unwrap();
            source.holder(&key, SystemTime::now()).map(|holder| holder.grant)
        };
        let acme = Ok(Grant::Tenant("acme".into()));
        for entries in [[&entry, a, b, c], [a, &entry, b, c], [a, b, &entry, c], [c, b, a, &entry]]
        {
            assert_eq!(holder(&entries), acme);
        }
        for entries in [&[a, b, c][..], &[b], &[]] {
            assert_eq!(holder(entries), Err(Refusal::Unknown));
        }
    }

    #[test]
    fn every_key_of_a_long_file_is_accepted() {
        let file = File::new();
        let keys: Vec<_> = (0..300).map(|n| tenant_key(&format!("t{n}"), None)).collect();
        file.write(&keys.iter().map(|(_, entry)| entry).collect::<Vec<_>>());
        let source = KeySource::open(&file.path()).unwrap();
        for (number, (key, entry)) in keys.iter().enumerate() {
            let holder = source.holder(key, SystemTime::now()).unwrap();
            let grant = Grant::Tenant(format!("t{number}").into());
            assert_eq!(holder, KeyHolder { id: entry.id.as_str().into(), grant });
        }
    }

    #[test]
    fn a_key_expires() {
        let file = File::new();
        let (key, entry) = tenant_key("acme", Some("2026-01-01"));
        file.write(&[&entry]);
        let source = KeySource::open(&file.path()).unwrap();
        let end = humantime::parse_rfc3339("2026-01-01T00:00:00Z").unwrap();
        assert!(source.holder(&key, end - Duration::from_millis(1)).is_ok());
        assert!(source.expired_and_used(end - Duration::from_secs(60)).is_empty());
        assert_eq!(source.holder(&key, end), Err(Refusal::Expired));
        let used = |since| source.expired_and_used(since).len();
        assert_eq!([end, end + Duration::from_secs(1)].map(used), [1, 0]);
    }

    #[test]
    fn a_changed_file_is_used_and_one_that_cannot_be_used_changes_nothing() {
        let file = File::new();
        let [(old, old_entry), (new, new_entry)] = [(); 2].map(|()| tenant_key("acme", None));
        file.write(&[&old_entry]);
        let source = KeySource::open(&file.path()).unwrap();
        let accepted = || {
            source.refresh();
            [&old, &new].map(|key| source.holder(key, SystemTime::now()).is_ok())
        };
        assert_eq!(accepted(), [true, false]);
        file.write(&[&old_entry, &new_entry]);
        assert_eq!(accepted(), [true, true], "both are valid while clients change over");
        file.write(&[&new_entry]);
        assert_eq!(accepted(), [false, true], "the old key is revoked");
        for unusable in ["", "keys:\n- id: x\n", "nonsense"] {
            std::fs::write(file.path(), unusable).unwrap();
            assert_eq!(accepted(), [false, true], "{unusable}");
        }
        std::fs::remove_file(file.path()).unwrap();
        assert_eq!(accepted(), [false, true]);
        file.write(&[&old_entry]);
        assert_eq!(accepted(), [true, false], "the next usable file is used");
    }

    #[test]
    fn a_pipe_in_the_place_of_the_file_is_not_waited_for() {
        let file = File::new();
        let [(old, old_entry), (new, new_entry)] = [(); 2].map(|()| tenant_key("acme", None));
        file.write(&[&old_entry]);
        let source = KeySource::open(&file.path()).unwrap();
        let accepts = |key: &str| source.holder(key, SystemTime::now()).is_ok();
        std::fs::remove_file(file.path()).unwrap();
        let made = std::process::Command::new("mkfifo").arg(file.path()).status();
        assert!(made.unwrap().success());
        source.refresh();
        assert!(accepts(&old) && !source.is_current(Instant::now()));
        std::fs::remove_file(file.path()).unwrap();
        file.write(&[&new_entry]);
        source.refresh();
        assert!(accepts(&new) && !accepts(&old) && source.is_current(Instant::now()));
    }

    #[test]
    fn a_read_that_does_not_end_is_shown_and_not_begun_again() {
        let file = File::new();
        file.write(&[&tenant_key("acme", None).1]);
        let source = Arc::new(KeySource::open(&file.path()).unwrap());
        let now = Instant::now();
        let read = source.due_read(now).unwrap();
        let late = now + READ_MAX;
        assert!(source.is_current(now) && !source.is_current(late));
        assert!(source.due_read(late).is_none());
        read();
        assert!(source.is_current(late) && source.due_read(late).is_some());
    }

    #[test]
    fn a_file_is_read_again_when_others_may_read_it() {
        let file = File::new();
        file.write(&[&tenant_key("acme", None).1]);
        let before = file_state(&file.path());
        std::fs::set_permissions(file.path(), Permissions::from_mode(0o640)).unwrap();
        assert_ne!(file_state(&file.path()), before);
    }
}
