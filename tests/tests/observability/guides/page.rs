//! A page with a decision tree, in steps.

/// A guide of `docs/guides`.
pub(crate) struct Page {
    name: &'static str,
    text: String,
}

impl Page {
    pub(crate) fn read(name: &'static str) -> Self {
        let path = format!("{}/../docs/guides/{name}.md", env!("CARGO_MANIFEST_DIR"));
        Self { name, text: std::fs::read_to_string(path).unwrap() }
    }

    /// The text of a step.
    fn step(&self, step: u32) -> &str {
        let begin = format!("\n## {step}. ");
        let rest = self.text.split_once(&begin).map(|(_, rest)| rest);
        let rest = rest.unwrap_or_else(|| panic!("{} has no step {step}", self.name));
        rest.split_once("\n## ").map_or(rest, |(step, _)| step)
    }

    /// The only line in a step's blocks, or in the text before the first step (0), that has `part`.
    pub(crate) fn line(&self, step: u32, part: &str) -> &str {
        let text = match step {
            0 => self.text.split_once("\n## ").map_or(&*self.text, |(head, _)| head),
            step => self.step(step),
        };
        let blocks = text.split("```").skip(1).step_by(2);
        let lines = blocks.flat_map(str::lines).filter(|line| line.contains(part));
        let found: Vec<&str> = lines.collect();
        assert_eq!(found.len(), 1, "{}, step {step}: lines with {part}: {found:?}", self.name);
        found[0]
    }

    /// A step has a row, or a paragraph, that says both: what is seen, and what to do.
    pub(crate) fn says(&self, step: u32, seen: &str, remedy: &str) {
        let is_it = |line: &&str| line.contains(seen) && line.contains(remedy);
        let found = self.step(step).lines().find(is_it);
        assert!(found.is_some(), "{}, step {step}: no line says {seen} and {remedy}", self.name);
    }
}
