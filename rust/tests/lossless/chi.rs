//! Pearson's chi-square test, its false-failure rate and its power.

/// Probability of failing a clean run.
pub const FALSE_FAILURE: f64 = 1e-9;

/// Cells expected to be rarer than this many times are counted together.
const LEAST_EXPECTED: f64 = 8.0;

/// Counts compared with a law.
#[derive(Debug)]
pub struct Test {
    pub statistic: f64,
    pub freedom: f64,
}

impl Test {
    /// `counts` against `law`, which sums to 1. Panics if something impossible was counted.
    pub fn new(counts: &[u64], law: &[f64]) -> Self {
        assert_eq!(counts.len(), law.len());
        let total: u64 = counts.iter().sum();
        let (mut statistic, mut cells, mut rare) = (0.0, 0, (0.0, 0.0));
        for (&count, &p) in counts.iter().zip(law) {
            let (count, expected) = (count as f64, p * total as f64);
            assert!(p > 0.0 || count == 0.0, "an impossible outcome came {count} times");
            if expected < LEAST_EXPECTED {
                rare = (rare.0 + count, rare.1 + expected);
            } else {
                statistic += (count - expected).powi(2) / expected;
                cells += 1;
            }
        }
        if rare.1 > 0.0 {
            statistic += (rare.0 - rare.1).powi(2) / rare.1.max(LEAST_EXPECTED);
            cells += 1;
        }
        Test { statistic, freedom: f64::from(cells - 1) }
    }

    /// Probability of a statistic at least this large if the law is right.
    pub fn p_value(&self) -> f64 {
        if self.freedom == 0.0 { 1.0 } else { upper_gamma(self.freedom / 2.0, self.statistic / 2.0) }
    }

    pub fn passes(&self) -> bool {
        self.p_value() >= FALSE_FAILURE
    }
}

#[track_caller]
pub fn assert_law(counts: &[u64], law: &[f64], what: &str) {
    let test = Test::new(counts, law);
    assert!(test.passes(), "{what}: {test:?}, p = {:e}", test.p_value());
}

/// Probability that `runs` draws from `actual` fail the test against `law`: the upper tail of the
/// non-central chi-square law with non-centrality runs * sum (actual - law)^2 / law.
pub fn power(runs: usize, law: &[f64], actual: &[f64]) -> f64 {
    let cells = law.iter().filter(|p| **p > 0.0).count();
    let shift: f64 =
        law.iter().zip(actual).filter(|(p, _)| **p > 0.0).map(|(p, a)| (a - p).powi(2) / p).sum();
    let (half_freedom, half_shift) = ((cells - 1) as f64 / 2.0, runs as f64 * shift / 2.0);
    let (mut low, mut high) = (0.0, 1e6);
    while high - low > 1e-9 * high {
        let middle = 0.5 * (low + high);
        *(if upper_gamma(half_freedom, middle) > FALSE_FAILURE { &mut low } else { &mut high }) = middle;
    }
    // A Poisson mixture of central laws.
    let spread = 12.0 * half_shift.sqrt() + 30.0;
    let from = (half_shift - spread).max(0.0) as usize;
    (from..(half_shift + spread) as usize)
        .map(|j| {
            let j = j as f64;
            (j * half_shift.ln() - half_shift - ln_gamma(j + 1.0)).exp() * upper_gamma(half_freedom + j, high)
        })
        .sum()
}

/// Lanczos' approximation.
fn ln_gamma(x: f64) -> f64 {
    const C: [f64; 6] = [
        76.180_091_729_471_46,
        -86.505_320_329_416_77,
        24.014_098_240_830_91,
        -1.231_739_572_450_155,
        1.208_650_973_866_179e-3,
        -5.395_239_384_953e-6,
    ];
    let series: f64 = C.iter().enumerate().map(|(i, c)| c / (x + 1.0 + i as f64)).sum();
    let t = x + 5.5;
    (x + 0.5) * t.ln() - t + (2.506_628_274_631_000_5 * (1.000_000_000_190_015 + series) / x).ln()
}

/// The regularised upper incomplete gamma function Q(a, x), by its series or its continued fraction.
fn upper_gamma(a: f64, x: f64) -> f64 {
    if x <= 0.0 {
        return 1.0;
    }
    let front = (a * x.ln() - x - ln_gamma(a)).exp();
    if x < a + 1.0 {
        let (mut term, mut sum, mut n) = (1.0 / a, 1.0 / a, a);
        while term > sum * 1e-16 {
            n += 1.0;
            term *= x / n;
            sum += term;
        }
        return 1.0 - sum * front;
    }
    let mut b = x + 1.0 - a;
    let (mut c, mut d) = (1e300, 1.0 / b);
    let mut h = d;
    for i in 1..100_000 {
        let i = f64::from(i);
        let an = -i * (i - a);
        b += 2.0;
        d = 1.0 / (an * d + b);
        c = b + an / c;
        h *= d * c;
        if (d * c - 1.0).abs() < 1e-15 {
            break;
        }
    }
    front * h
}

/// Table values: 95 % and 1e-9 points, and one known power (5 degrees of freedom, non-centrality 20 at 1e-9).
#[test]
fn tails_are_those_of_the_tables() {
    for (freedom, point, tail) in
        [(1.0, 3.841_459, 0.05), (7.0, 14.067_14, 0.05), (7.0, 55.9, 1e-9), (60.0, 79.082, 0.05)]
    {
        let found = upper_gamma(freedom / 2.0, point / 2.0);
        assert!((found / tail - 1.0).abs() < 0.1 && (tail < 0.01 || (found - tail).abs() < 1e-5), "{found}");
    }
    // Two cells of one half, a shift of 0.01 and 250,000 runs: the normal law says 1 - Phi(6.109 - 10).
    let found = power(250_000, &[0.5, 0.5], &[0.51, 0.49]);
    assert!((found - 0.999_950).abs() < 5e-6, "{found}");
}
