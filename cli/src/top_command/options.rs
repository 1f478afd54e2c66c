//! What the person at the keyboard has chosen.

/// The order of workers within a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Sort {
    /// By id.
    #[default]
    Name,
    /// The most requests first.
    Requests,
    /// The most prompt tokens that are not computed yet first.
    PrefillTokens,
    /// The fullest KV cache first.
    KvUsed,
    /// The largest share of cached prompt tokens first.
    HitRatio,
}

impl Sort {
    const ALL: [Self; 5] =
        [Self::Name, Self::Requests, Self::PrefillTokens, Self::KvUsed, Self::HitRatio];

    /// The name on the screen.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Requests => "requests",
            Self::PrefillTokens => "prefill",
            Self::KvUsed => "KV",
            Self::HitRatio => "hit",
        }
    }

    fn next(self) -> Self {
        let at = Self::ALL.iter().position(|sort| *sort == self).unwrap_or_default();
        Self::ALL[(at + 1) % Self::ALL.len()]
    }
}

/// What was chosen.
#[derive(Clone, Debug, Default)]
pub(super) struct Options {
    pub(super) sort: Sort,
    /// The only model that is shown; `None` for all.
    pub(super) model: Option<String>,
    pub(super) is_paused: bool,
    /// The number of worker lines above the screen.
    pub(super) scroll: usize,
}

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Quit,
    Pause,
    Sort,
    Model,
    /// Scrolls by this number of lines.
    Scroll(isize),
    /// Draws the screen again, from nothing.
    Redraw,
}

impl Options {
    /// Whether a model is shown.
    pub(super) fn shows(&self, model: &str) -> bool {
        self.model.as_deref().is_none_or(|chosen| chosen == model)
    }

    /// Changes what was chosen; `models` are the names of all models.
    pub(super) fn apply(&mut self, action: Action, models: &[&str]) {
        match action {
            Action::Pause => self.is_paused = !self.is_paused,
            Action::Sort => self.sort = self.sort.next(),
            Action::Model => {
                let at = self.model.as_deref().map(|chosen| {
                    models.iter().position(|model| *model == chosen).unwrap_or(models.len())
                });
                let next = models.get(at.map_or(0, |at| at + 1));
                self.model = next.map(|model| (*model).to_owned());
                self.scroll = 0;
            }
            Action::Scroll(lines) => self.scroll = self.scroll.saturating_add_signed(lines),
            Action::Quit | Action::Redraw => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_key_goes_through_all_models_and_back_to_all_of_them() {
        let mut options = Options::default();
        let models = ["a", "b"];
        let chosen: Vec<_> = (0..4)
            .map(|_| {
                options.apply(Action::Model, &models);
                options.model.clone()
            })
            .collect();
        assert_eq!(chosen, [Some("a".into()), Some("b".into()), None, Some("a".into())]);
        // The model has been removed meanwhile.
        options.apply(Action::Model, &[]);
        assert_eq!(options.model, None);
    }

    #[test]
    fn the_sort_key_goes_through_all_orders() {
        let mut options = Options::default();
        Sort::ALL.iter().for_each(|_| options.apply(Action::Sort, &[]));
        assert_eq!(options.sort, Sort::Name);
        options.apply(Action::Scroll(-5), &[]);
        assert_eq!(options.scroll, 0);
    }
}
