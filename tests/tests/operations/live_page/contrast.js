// Returns the texts of the page whose contrast with what is behind them is below that of WCAG 2.2,
// level AA (success criterion 1.4.3): 4.5, or 3 for large text.

const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });

function parse(color) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = color;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return { rgb: [r, g, b], alpha: a / 255 };
}

function over({ rgb, alpha }, ground) {
  return rgb.map((part, index) => part * alpha + ground[index] * (1 - alpha));
}

function behind(element) {
  if (element === null) return [255, 255, 255];
  const own = parse(getComputedStyle(element).backgroundColor);
  return own.alpha === 1 ? own.rgb : over(own, behind(element.parentElement));
}

function luminance(rgb) {
  const linear = rgb.map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

const poor = [];
let seen = 0;
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const text = walker.currentNode.textContent.trim();
  if (text === "" || !element.checkVisibility() || element.closest("script, option, title")) continue;
  const style = getComputedStyle(element);
  const ground = behind(element);
  const color = element instanceof SVGElement ? style.fill : style.color;
  const [a, b] = [luminance(over(parse(color), ground)), luminance(ground)];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const size = parseFloat(style.fontSize);
  const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  seen += 1;
  if (contrast < (isLarge ? 3 : 4.5)) {
    poor.push(`${text.slice(0, 40)} (${element.className.baseVal ?? element.className}): ${contrast.toFixed(2)}`);
  }
}
return { seen, poor };
