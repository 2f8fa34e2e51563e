// A picture of a pass's tree: a column a depth, with as many dots as it has nodes, and the accepted path on top.

const SPACE = "http://www.w3.org/2000/svg";
const STEP = 22, ROW = 9, MOST = 12; // pixels; dots in a column, beyond which a number stands

function part(name, values, text = "") {
  const node = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(values)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

/** Return the picture of a tree's sizes by depth, of which the first `accepted` depths gave a token. */
export function treePicture({ sizes, accepted }) {
  const rows = Math.min(MOST, Math.max(1, ...sizes));
  const [width, height] = [STEP * (sizes.length + 1) + 8, ROW * (rows + 1) + 18];
  const nodes = sizes.reduce((one, other) => one + other, 0);
  const label = `Last tree: ${sizes.length} deep, ${nodes} ${nodes === 1 ? "node" : "nodes"}, ${accepted} accepted.`;
  const picture = part("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  const x = (depth) => 8 + STEP * depth;
  picture.append(part("line", { x1: x(0), y1: 10, x2: x(accepted), y2: 10, class: "path" }));
  picture.append(part("circle", { cx: x(0), cy: 10, r: 4, class: "root" }));
  sizes.forEach((size, index) => {
    for (let row = 0; row < Math.min(size, MOST); row += 1) {
      const kind = row === 0 && index < accepted ? "accepted" : "drafted";
      picture.append(part("circle", { cx: x(index + 1), cy: 10 + ROW * row, r: 3, class: kind }));
    }
    picture.append(part("text", { x: x(index + 1), y: height - 4, "text-anchor": "middle" }, String(size)));
  });
  return [picture, label];
}
