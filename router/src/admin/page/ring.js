// The last values of some columns. Nothing grows: the oldest row makes room for the next.

export class Ring {
  constructor(capacity, columns) {
    this.capacity = capacity;
    this.times = new Float64Array(capacity);
    this.columns = columns.map(() => new Float64Array(capacity));
    this.length = 0;
    this.first = 0;
  }

  clear() {
    this.length = 0;
    this.first = 0;
  }

  /** Adds a row. A row that is not newer than the last one is left out. */
  push(time, row) {
    if (this.length > 0 && time <= this.time(this.length - 1)) return;
    const at = (this.first + this.length) % this.capacity;
    if (this.length < this.capacity) this.length += 1;
    else this.first = (this.first + 1) % this.capacity;
    this.times[at] = time;
    this.columns.forEach((column, index) => {
      const value = row[index];
      column[at] = typeof value === "number" ? value : NaN;
    });
  }

  time(index) {
    return this.times[(this.first + index) % this.capacity];
  }

  value(column, index) {
    return this.columns[column][(this.first + index) % this.capacity];
  }

  /** The first row that is not older than a time. */
  since(time) {
    let index = 0;
    while (index < this.length && this.time(index) < time) index += 1;
    return index;
  }
}
