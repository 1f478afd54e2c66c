//! `release/package`: the same programs make the same bytes, and each artefact has what it must have.
//! Here the programs are small ones of the system; a release starts what it has made.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const VERSION: &str = env!("CARGO_PKG_VERSION");

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// What a command prints; it must succeed.
fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {printed}{said}");
    printed
}

/// Makes artefacts of a folder of programs: all, unless they are named.
fn package(programs: &Path, made: &Path, artefacts: &[&str]) {
    output(
        Command::new("python3")
            .arg(root().join("release/package"))
            .arg("--no-verify")
            .arg("--programs")
            .arg(programs)
            .arg("--output")
            .arg(made)
            .args(artefacts)
            // A time that no clock shows.
            .env("SOURCE_DATE_EPOCH", "1700000000"),
    );
}

fn names(folder: &Path) -> Vec<String> {
    let files = fs::read_dir(folder).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// The only artefact with such a name.
fn artefact(folder: &Path, end: &str) -> PathBuf {
    let names: Vec<String> = names(folder).into_iter().filter(|name| name.ends_with(end)).collect();
    assert_eq!(names.len(), 1, "{end}: {names:?}");
    folder.join(&names[0])
}

fn listed(command: &mut Command, wanted: &[&str]) {
    let listed = output(command);
    for name in wanted {
        assert!(listed.contains(name), "{name} is not in\n{listed}");
    }
}

fn small_programs(files: &Path) -> PathBuf {
    let programs = files.join("programs");
    fs::create_dir(&programs).unwrap();
    fs::copy("/bin/true", programs.join("splitrail")).unwrap();
    fs::copy("/bin/false", programs.join("splitrail-shim")).unwrap();
    programs
}

#[test]
fn the_same_programs_make_the_same_bytes_and_every_artefact_is_whole() {
    let files = tempfile::tempdir().unwrap();
    let programs = small_programs(files.path());
    let (first, second) = (files.path().join("first"), files.path().join("second"));
    package(&programs, &first, &[]);
    package(&programs, &second, &[]);
    assert_eq!(names(&first), names(&second));
    for name in names(&first) {
        let same = fs::read(first.join(&name)).unwrap() == fs::read(second.join(&name)).unwrap();
        assert!(same, "{name} differs");
    }
    output(Command::new("sha256sum").args(["--check", "SHA256SUMS"]).current_dir(&first));
    let summed = fs::read_to_string(first.join("SHA256SUMS")).unwrap().lines().count();
    assert_eq!(summed, 6, "artefacts: an archive, two bills, a wheel, a package, an image");

    let archive = artefact(&first, "-unknown-linux-gnu.tar.gz");
    let wanted = ["/splitrail\n", "/splitrail-shim\n", "/LICENSE", "/THIRD-PARTY-LICENSES.txt"];
    listed(Command::new("tar").arg("tzf").arg(archive), &wanted);

    let wheel = artefact(&first, ".whl");
    let record = format!("splitrail-{VERSION}.dist-info/RECORD");
    let checked = output(Command::new("python3").args(["-c", WHEEL]).arg(&wheel).arg(&record));
    assert!(checked.trim().parse::<u32>().unwrap() >= 8, "files: {checked}");

    let package = artefact(&first, ".deb");
    let version = ["--field", &package.display().to_string(), "Version"].map(str::to_owned);
    assert_eq!(output(Command::new("dpkg-deb").args(version)).trim(), format!("{VERSION}-1"));
    let wanted = [
        " ./usr/bin/splitrail\n",
        " ./usr/bin/splitrail-shim\n",
        " ./etc/splitrail/splitrail.yaml\n",
        "/systemd/system/splitrail.service\n",
        "/systemd/system/splitrail-shim.service\n",
        "/copyright\n",
    ];
    listed(Command::new("dpkg-deb").arg("--contents").arg(package), &wanted);

    let image = artefact(&first, ".oci.tar");
    let layers = output(Command::new("python3").args(["-c", IMAGE]).arg(image));
    for path in ["usr/local/bin/splitrail", "usr/local/bin/splitrail-shim", "tmp", "etc/passwd"] {
        assert!(layers.lines().any(|line| line == path), "{path} is not in\n{layers}");
    }
    assert!(layers.contains("etc/ssl/certs/ca-certificates.crt"), "{layers}");
}

#[test]
fn the_index_of_images_has_each_image_with_the_programs_for_its_processor() {
    let files = tempfile::tempdir().unwrap();
    let made = files.path().join("made");
    package(&small_programs(files.path()), &made, &["image"]);
    let image = artefact(&made, ".oci.tar");
    let mut python = Command::new("python3");
    python.args(["-B", "-c", INDEX]).arg(root().join("release")).arg(image);
    assert_eq!(output(&mut python).trim(), "ok");
}

#[test]
fn a_run_that_fails_leaves_what_an_earlier_run_has_made() {
    let files = tempfile::tempdir().unwrap();
    let programs = small_programs(files.path());
    let made = files.path().join("made");
    package(&programs, &made, &["sbom"]);
    let before = names(&made);
    fs::remove_file(programs.join("splitrail-shim")).unwrap();
    let mut again = Command::new("python3");
    again.arg(root().join("release/package")).args(["--no-verify", "sbom"]);
    again.arg("--programs").arg(&programs).arg("--output").arg(&made);
    assert_eq!(again.status().unwrap().code(), Some(1));
    assert_eq!(names(&made), before);
    again.arg("--output").arg(files.path().join("never"));
    assert_eq!(again.status().unwrap().code(), Some(1));
    assert_eq!(names(files.path()), ["made", "programs"]);
}

#[test]
fn programs_for_the_same_processor_are_not_packaged_together() {
    let files = tempfile::tempdir().unwrap();
    let programs = small_programs(files.path());
    let refused = Command::new("python3")
        .arg(root().join("release/package"))
        .args(["--no-verify", "sbom", "--output"])
        .arg(files.path().join("made"))
        .args([Path::new("--programs"), &programs, Path::new("--programs"), &programs])
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.starts_with("two folders have programs for"), "{said}");
}

/// Compares each file of a wheel with its list of files, and prints their number.
const WHEEL: &str = r#"
import base64, hashlib, sys, zipfile
wheel, record = zipfile.ZipFile(sys.argv[1]), sys.argv[2]
lines = [line.rsplit(",", 2) for line in wheel.read(record).decode().splitlines()]
assert sorted(name for name, _, _ in lines) == sorted(wheel.namelist()), lines
for name, digest, size in lines:
    data = wheel.read(name)
    expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    assert name == record or (digest, size) == ("sha256=" + expected, str(len(data))), name
scripts = [one for one in wheel.infolist() if ".data/scripts/" in one.filename]
assert len(scripts) == 2 and all(one.external_attr >> 16 & 0o111 for one in scripts), scripts
print(len(lines))
"#;

/// Follows an image from its index to the layers, compares all digests, and prints the paths.
const IMAGE: &str = r#"
import gzip, hashlib, io, json, sys, tarfile
image = tarfile.open(sys.argv[1])
def blob(pointer):
    data = image.extractfile("blobs/" + pointer["digest"].replace(":", "/")).read()
    assert "sha256:" + hashlib.sha256(data).hexdigest() == pointer["digest"], pointer
    assert len(data) == pointer["size"], pointer
    return data
manifest = json.loads(blob(json.load(image.extractfile("index.json"))["manifests"][0]))
config = json.loads(blob(manifest["config"]))
assert config["config"]["User"] == "65532:65532", config
for pointer, digest in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
    layer = gzip.decompress(blob(pointer))
    assert "sha256:" + hashlib.sha256(layer).hexdigest() == digest, digest
    print("\n".join(tarfile.open(fileobj=io.BytesIO(layer)).getnames()))
"#;

/// Puts an image and copies of it, which say that they are for the other processor, into indexes.
const INDEX: &str = r#"
import gzip, io, json, pathlib, sys, tarfile
sys.path.insert(0, sys.argv[1])
from artefacts import archive, image_index, oci
image = pathlib.Path(sys.argv[2])
parts = image_index.files(image)
pointer = json.loads(parts["index.json"])["manifests"][0]
manifest = json.loads(parts[oci.path(pointer)])
config = json.loads(parts[oci.path(manifest["config"])])
names = {"amd64": 62, "arm64": 183}
native = config["architecture"]
[other] = set(names) - {native}

def copy(programs):
    "A copy for the other processor, whose programs are for the given one."
    layers = [gzip.decompress(parts[oci.path(layer)]) for layer in manifest["layers"]]
    changed = bytearray(layers[-1])
    for member in tarfile.open(fileobj=io.BytesIO(layers[-1])):
        if member.name.startswith(oci.FOLDER + "/"):
            changed[member.offset_data + 18] = names[programs]
    layers[-1] = bytes(changed)
    tree = oci.Layout()
    stored = [tree.part("layer.v1.tar+gzip", archive.compress(layer)) for layer in layers]
    digests = [image_index.digest(layer) for layer in layers]
    about = config | {"architecture": other, "rootfs": {"type": "layers", "diff_ids": digests}}
    about = tree.part("config.v1+json", oci.to_json(about))
    whole = tree.part("manifest.v1+json", oci.to_json(manifest | {"config": about, "layers": stored}))
    tree.publish(whole | {"platform": {"architecture": other, "os": "linux"}}, "1")
    path = image.with_name(f"{programs}.tar")
    path.write_bytes(archive.tar(tree, 1700000000))
    return path

def refused(parts):
    try:
        image_index.processors(parts)
    except SystemExit:
        return True

index = image_index.layout([image, copy(other)], "1")
files = {name: entry.data for name, entry in index.items()}
assert image_index.processors(files) == [native, other]
[whole] = json.loads(files["index.json"])["manifests"]
listed = json.loads(files[oci.path(whole)])["manifests"]
assert listed[0]["digest"] == pointer["digest"], "an image changes its digest in the index"
wrong = image_index.layout([image, copy(native)], "1")
assert refused({name: entry.data for name, entry in wrong.items()}), "programs for another processor"
layer = oci.path(manifest["layers"][0])
assert refused(files | {layer: files[layer][:-1] + b"?"}), "another digest"
print("ok")
"#;
