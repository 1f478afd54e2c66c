//! What the command lines of all programs have in common.

/// Checks the value of `--only` against the names of a program's workloads.
///
/// # Errors
/// A message that lists the names, if the value is none of them.
pub(crate) fn known_workload<'a>(
    name: String,
    workloads: impl IntoIterator<Item = &'a str>,
) -> Result<String, String> {
    let names: Vec<&str> = workloads.into_iter().collect();
    if names.contains(&name.as_str()) {
        return Ok(name);
    }
    Err(format!("there is no workload {name}; choose one of {}", names.join(", ")))
}
