"use strict";
// A click on a heading sorts its table: numbers as numbers, by what the cell says in data-value where it says it.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  const value = (row, index) => row.cells[index].dataset.value ?? row.cells[index].textContent.trim();
  headings.forEach((heading, index) => {
    heading.tabIndex = 0;
    const sort = () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const order = (a, b) => value(a, index).localeCompare(value(b, index), undefined, { numeric: true });
      const numbers = (a, b) => Number(value(a, index)) - Number(value(b, index));
      const body = table.tBodies[0];
      const rows = [...body.rows];
      const isNumeric = rows.every((row) => row.cells[index].dataset.value !== undefined);
      rows.sort(isNumeric ? numbers : order);
      body.append(...(down ? rows.reverse() : rows));
    };
    heading.addEventListener("click", sort);
    heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}
// What is typed leaves the rows of a table that have each of its words.
for (const field of document.querySelectorAll("input[data-filters]")) {
  const rows = [...document.getElementById(field.dataset.filters).tBodies[0].rows];
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
    rows.forEach((row) => { row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word)); });
  });
}
// What is folded away on a screen is read on paper.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
