//! A guide, of which tests run what it tells people to run.

/// A page of `docs/guides`.
pub struct Page {
    name: &'static str,
    text: String,
}

impl Page {
    /// Reads a guide by its name.
    pub fn read(name: &'static str) -> Self {
        let path = format!("{}/../docs/guides/{name}.md", env!("CARGO_MANIFEST_DIR"));
        Self { name, text: std::fs::read_to_string(path).expect("a guide") }
    }

    /// The text of a section, by its heading.
    fn section(&self, heading: &str) -> &str {
        let begin = format!("\n## {heading}");
        let rest = self.text.split_once(&begin).map(|(_, rest)| rest);
        let rest = rest.unwrap_or_else(|| panic!("{} has no section {heading}", self.name));
        rest.split_once("\n## ").map_or(rest, |(section, _)| section)
    }

    /// The text of a step.
    fn step(&self, step: u32) -> &str {
        self.section(&format!("{step}. "))
    }

    /// The blocks of a section, without the word that names their language.
    pub fn blocks(&self, heading: &str) -> Vec<&str> {
        let blocks = self.section(heading).split("```").skip(1).step_by(2);
        blocks.map(|block| block.split_once('\n').map_or("", |(_, lines)| lines)).collect()
    }

    /// The only block of a section that has `part`.
    pub fn block(&self, heading: &str, part: &str) -> &str {
        let blocks = self.blocks(heading).into_iter().filter(|block| block.contains(part));
        let found: Vec<&str> = blocks.collect();
        assert_eq!(found.len(), 1, "{}, {heading}: blocks with {part}: {found:?}", self.name);
        found[0]
    }

    /// The only line in a step's blocks, or in the text before the first step (0), that has `part`.
    pub fn line(&self, step: u32, part: &str) -> &str {
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
    pub fn says(&self, step: u32, seen: &str, remedy: &str) {
        let is_it = |line: &&str| line.contains(seen) && line.contains(remedy);
        let found = self.step(step).lines().find(is_it);
        assert!(found.is_some(), "{}, step {step}: no line says {seen} and {remedy}", self.name);
    }
}
