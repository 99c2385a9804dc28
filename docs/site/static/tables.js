// Tables of class `filtered`: sorted by the buttons in their header, filtered by the controls before them.
"use strict";

(function () {
  const collator = new Intl.Collator("en", { numeric: true });

  function cellValue(row, column) {
    const cell = row.cells[column];
    return cell.dataset.sort ?? cell.textContent.trim();
  }

  function setUp(table) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const form = document.getElementById(table.dataset.controls);
    const count = form.querySelector("output");

    function filter() {
      const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const chosen = [...form.querySelectorAll("select")].every((s) => !s.value || row.dataset[s.name] === s.value);
        const text = row.textContent.toLowerCase();
        row.hidden = !(chosen && words.every((word) => text.includes(word)));
        shown += row.hidden ? 0 : 1;
      }
      count.textContent = `${shown} of ${rows.length}`;
    }

    function sortBy(header) {
      const column = [...header.parentElement.cells].indexOf(header);
      const down = header.getAttribute("aria-sort") === "ascending";
      for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      const ordered = [...rows].sort((a, b) => collator.compare(cellValue(a, column), cellValue(b, column)));
      body.append(...(down ? ordered.reverse() : ordered));
    }

    for (const header of table.tHead.rows[0].cells) {
      const button = header.querySelector("button");
      if (button) button.addEventListener("click", () => sortBy(header));
    }
    form.addEventListener("input", filter);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(filter));
    filter();
  }

  document.querySelectorAll("table.filtered").forEach(setUp);
})();
