//! Which modules of a crate import which, and the cycles among them.
//!
//! An import is a `use` item or a path that begins with `crate`, `super`, `self` or a child module.
//! A name that a module re-exports counts as an import of the module that it comes from.

use std::collections::{BTreeMap, BTreeSet};

use super::sources::Modules;

/// For each module, the modules that it imports from.
pub(super) type Imports = BTreeMap<String, BTreeSet<String>>;

/// Re-exports are followed this often; more is a cycle among them.
const REEXPORTS_MAX: usize = 8;

/// A path as it is written, or from the root of the crate.
pub(super) type Path = Vec<String>;

/// Reads the imports of all modules of a crate.
pub(super) fn imports(modules: &Modules) -> Imports {
    let mut reexports = BTreeMap::new();
    let mut written: Vec<(&String, Path)> = Vec::new();
    for (module, code) in modules {
        let (uses, rest) = split_uses(code);
        for (is_public, tree) in uses {
            let mut leaves = Vec::new();
            expand(&[], &tree, &mut leaves);
            for (path, name) in leaves {
                let Some(path) = absolute(modules, module, &path) else { continue };
                if is_public {
                    reexports.insert((module.clone(), name), path);
                } else {
                    written.push((module, path));
                }
            }
        }
        let inline = paths(&rest).into_iter();
        written.extend(inline.filter_map(|p| Some((module, absolute(modules, module, &p)?))));
    }
    let mut imports: Imports = modules.keys().map(|name| (name.clone(), BTreeSet::new())).collect();
    for (module, path) in written {
        let target = resolve(modules, &reexports, path);
        if target != *module {
            imports.entry(module.clone()).or_default().insert(target);
        }
    }
    imports
}

/// All paths that a module names, as they are written: those of its `use` items and those in its
/// code.
pub(super) fn named_paths(code: &str) -> Vec<Path> {
    let (uses, rest) = split_uses(code);
    let mut leaves = Vec::new();
    for (_, tree) in &uses {
        expand(&[], tree, &mut leaves);
    }
    leaves.into_iter().map(|(path, _)| path).chain(paths(&rest)).collect()
}

/// The sets of modules that import each other, directly or through others; only those of two and
/// more.
pub(super) fn cycles(imports: &Imports) -> Vec<Vec<String>> {
    let reached: BTreeMap<&String, BTreeSet<&String>> =
        imports.keys().map(|module| (module, reachable(imports, module))).collect();
    let mut seen: BTreeSet<&String> = BTreeSet::new();
    let mut cycles = Vec::new();
    for (module, targets) in &reached {
        if seen.contains(module) {
            continue;
        }
        let back = targets.iter().filter(|target| reached[**target].contains(*module));
        let cycle: Vec<String> = back.map(|member| (*member).clone()).collect();
        seen.extend(targets.iter().copied().filter(|target| cycle.contains(target)));
        if cycle.len() > 1 {
            cycles.push(cycle);
        }
    }
    cycles
}

fn reachable<'a>(imports: &'a Imports, from: &'a String) -> BTreeSet<&'a String> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(module) = open.pop() {
        for target in imports.get(module).into_iter().flatten() {
            if reached.insert(target) {
                open.push(target);
            }
        }
    }
    reached
}

/// The `use` items of a module, each with whether it re-exports, and the rest of the code.
fn split_uses(code: &str) -> (Vec<(bool, String)>, String) {
    let mut uses = Vec::new();
    let mut rest = String::new();
    let mut lines = code.lines();
    while let Some(line) = lines.next() {
        let Some((is_public, begin)) = use_of(line.trim()) else {
            rest.push_str(line);
            rest.push('\n');
            continue;
        };
        let mut item = begin.to_owned();
        while !item.contains(';') {
            let Some(next) = lines.next() else { break };
            item.push_str(next.trim());
        }
        item.truncate(item.find(';').unwrap_or(item.len()));
        uses.push((is_public, item));
    }
    (uses, rest)
}

fn use_of(line: &str) -> Option<(bool, &str)> {
    if let Some(tree) = line.strip_prefix("use ") {
        return Some((false, tree));
    }
    let rest = line.strip_prefix("pub")?;
    let rest = match rest.strip_prefix('(') {
        Some(limited) => limited.split_once(')')?.1,
        None => rest,
    };
    Some((true, rest.trim_start().strip_prefix("use ")?))
}

/// The paths of a `use` tree, each with the name under which it is known.
fn expand(prefix: &[String], tree: &str, leaves: &mut Vec<(Path, String)>) {
    let tree = tree.trim();
    if let Some(group) = tree.strip_prefix('{').and_then(|tree| tree.strip_suffix('}')) {
        let (mut depth, mut begin) = (0, 0);
        for (at, char) in group.char_indices() {
            match char {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    expand(prefix, &group[begin..at], leaves);
                    begin = at + 1;
                }
                _ => {}
            }
        }
        expand(prefix, &group[begin..], leaves);
    } else if let Some((first, rest)) = tree.split_once("::") {
        expand(&[prefix, &[first.trim().to_owned()]].concat(), rest, leaves);
    } else if !tree.is_empty() {
        let (name, known_as) = tree.split_once(" as ").unwrap_or((tree, tree));
        match (name.trim(), prefix.last()) {
            ("self", Some(last)) => leaves.push((prefix.to_vec(), last.clone())),
            (name, _) => {
                leaves.push(([prefix, &[name.to_owned()]].concat(), known_as.trim().to_owned()));
            }
        }
    }
}

/// The paths of at least two parts in code.
fn paths(code: &str) -> Vec<Path> {
    let is_part = |char: char| char.is_alphanumeric() || char == '_' || char == ':';
    let words = code.split(|char| !is_part(char));
    let words = words.filter(|word| word.contains("::") && !word.starts_with("::"));
    words.map(|word| word.split("::").map(str::to_owned).collect()).collect()
}

/// A path from the root of the crate; `None` for a path into another crate.
fn absolute(modules: &Modules, module: &str, path: &[String]) -> Option<Path> {
    let mut base: Path =
        module.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect();
    let mut rest = path;
    match rest.first()?.as_str() {
        "crate" => return Some(rest[1..].to_vec()),
        "self" => rest = &rest[1..],
        "super" => {
            while rest.first().is_some_and(|part| part == "super") {
                base.pop();
                rest = &rest[1..];
            }
        }
        child => {
            let child = [&base[..], &[child.to_owned()]].concat().join("::");
            if !modules.contains_key(&child) {
                return None;
            }
        }
    }
    base.extend_from_slice(rest);
    Some(base)
}

/// The module in which the name of a path is defined.
fn resolve(
    modules: &Modules,
    reexports: &BTreeMap<(String, String), Path>,
    mut path: Path,
) -> String {
    for _ in 0..REEXPORTS_MAX {
        let deepest =
            (0..=path.len()).rev().find(|&parts| modules.contains_key(&path[..parts].join("::")));
        let parts = deepest.unwrap_or(0);
        let module = path[..parts].join("::");
        let name = path.get(parts).cloned().unwrap_or_default();
        match reexports.get(&(module.clone(), name)) {
            Some(origin) => path = [&origin[..], &path[parts + 1..]].concat(),
            None => return module,
        }
    }
    String::new()
}
