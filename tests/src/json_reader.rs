//! A second reading of JSON, written from RFC 8259 and sharing nothing with the router's: what it
//! reads in a body must be what every other reader finds there.

/// A value. Numbers stand as they were written.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number's text.
    Number(String),
    /// A string, unescaped.
    Text(String),
    /// An array.
    Array(Vec<Json>),
    /// An object, in the order of the text.
    Object(Vec<(String, Json)>),
}

/// Deeper values are not read.
const DEPTH_MAX: usize = 500;

impl Json {
    /// Reads a text. `None` if it is not JSON, names a member twice, or has half a surrogate pair.
    #[must_use]
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let text: Vec<char> = std::str::from_utf8(bytes).ok()?.chars().collect();
        let mut reader = Reader { text: &text, at: 0 };
        let value = reader.value(0)?;
        reader.space();
        (reader.at == text.len()).then_some(value)
    }

    /// A member of an object.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Self> {
        self.members().iter().find(|(given, _)| given == name).map(|(_, value)| value)
    }

    /// The members of an object; none of any other value.
    #[must_use]
    pub fn members(&self) -> &[(String, Self)] {
        match self {
            Self::Object(members) => members,
            _ => &[],
        }
    }
}

struct Reader<'t> {
    text: &'t [char],
    at: usize,
}

impl Reader<'_> {
    fn peek(&self) -> Option<char> {
        self.text.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += 1;
        Some(next)
    }

    fn takes(&mut self, wanted: char) -> bool {
        let is_there = self.peek() == Some(wanted);
        self.at += usize::from(is_there);
        is_there
    }

    fn space(&mut self) {
        while let Some(' ' | '\t' | '\n' | '\r') = self.peek() {
            self.at += 1;
        }
    }

    fn word(&mut self, word: &str, value: Json) -> Option<Json> {
        word.chars().all(|wanted| self.takes(wanted)).then_some(value)
    }

    fn value(&mut self, depth: usize) -> Option<Json> {
        self.space();
        match self.peek()? {
            _ if depth > DEPTH_MAX => None,
            'n' => self.word("null", Json::Null),
            't' => self.word("true", Json::Bool(true)),
            'f' => self.word("false", Json::Bool(false)),
            '"' => self.string().map(Json::Text),
            '[' => self.array(depth),
            '{' => self.object(depth),
            _ => self.number(),
        }
    }

    fn array(&mut self, depth: usize) -> Option<Json> {
        self.at += 1;
        let mut items = Vec::new();
        self.space();
        if self.takes(']') {
            return Some(Json::Array(items));
        }
        loop {
            items.push(self.value(depth + 1)?);
            self.space();
            match self.next()? {
                ',' => {}
                ']' => return Some(Json::Array(items)),
                _ => return None,
            }
        }
    }

    fn object(&mut self, depth: usize) -> Option<Json> {
        self.at += 1;
        let mut members: Vec<(String, Json)> = Vec::new();
        self.space();
        if self.takes('}') {
            return Some(Json::Object(members));
        }
        loop {
            self.space();
            let name = self.string()?;
            self.space();
            if !self.takes(':') || members.iter().any(|(given, _)| *given == name) {
                return None;
            }
            members.push((name, self.value(depth + 1)?));
            self.space();
            match self.next()? {
                ',' => {}
                '}' => return Some(Json::Object(members)),
                _ => return None,
            }
        }
    }

    fn string(&mut self) -> Option<String> {
        if !self.takes('"') {
            return None;
        }
        let mut text = String::new();
        loop {
            match self.next()? {
                '"' => return Some(text),
                '\\' => text.push(self.escaped()?),
                '\0'..='\u{1f}' => return None,
                plain => text.push(plain),
            }
        }
    }

    fn escaped(&mut self) -> Option<char> {
        Some(match self.next()? {
            'b' => '\u{8}',
            'f' => '\u{c}',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'u' => {
                let high = self.unit()?;
                if !(0xd800..0xdc00).contains(&high) {
                    return char::from_u32(high);
                }
                if !(self.takes('\\') && self.takes('u')) {
                    return None;
                }
                let low = self.unit().filter(|low| (0xdc00..0xe000).contains(low))?;
                return char::from_u32(0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00));
            }
            same @ ('"' | '\\' | '/') => same,
            _ => return None,
        })
    }

    fn unit(&mut self) -> Option<u32> {
        (0..4).try_fold(0, |unit, _| Some(unit << 4 | self.next()?.to_digit(16)?))
    }

    fn number(&mut self) -> Option<Json> {
        let begin = self.at;
        self.takes('-');
        if !self.takes('0') {
            self.digits()?;
        }
        if self.takes('.') {
            self.digits()?;
        }
        if self.takes('e') || self.takes('E') {
            let _sign = self.takes('+') || self.takes('-');
            self.digits()?;
        }
        Some(Json::Number(self.text[begin..self.at].iter().collect()))
    }

    fn digits(&mut self) -> Option<()> {
        let begin = self.at;
        while self.peek().is_some_and(|digit| digit.is_ascii_digit()) {
            self.at += 1;
        }
        (self.at > begin).then_some(())
    }
}
