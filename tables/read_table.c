/* Reads a decision table, and prints the route of one turn by Algorithm 1 of the PPD paper.
 *
 *   cc -O2 -o read_table read_table.c -ljansson -lm
 *   ./read_table TABLE.json CONTEXT_TOKENS NEW_TOKENS OUTPUT_TOKENS QPS [W_TTFT W_TPOT [W_THROUGHPUT]]
 *
 * The format is that of `ppd-eval table schema`. Exit status: 0; 1 if a value lies beyond the table;
 * 2 if there is no table of version 1, or no throughput in it that could be weighed. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const char *AXES[4] = {"context_tokens", "new_tokens", "output_tokens", "qps"};

static double number(const json_t *object, const char *key) {
    return json_number_value(json_object_get(object, key));
}

/* The index of the bin that holds value (low <= value < high), or -1. */
static long bin_of(const json_t *bins, double value) {
    size_t i;
    const json_t *bin;
    json_array_foreach(bins, i, bin)
        if (number(bin, "low") <= value && value < number(bin, "high")) return (long)i;
    return -1;
}

static double median(const json_t *cell, const char *route, const char *metric) {
    return number(json_object_get(json_object_get(cell, route), metric), "median");
}

/* The logarithm of the geometric mean of the seeds' throughput; NAN without one. */
static double log_throughput(const json_t *cell, const char *route) {
    const json_t *rates = json_object_get(json_object_get(cell, route), "tokens_per_s"), *rate;
    double sum = 0;
    size_t i;
    json_array_foreach(rates, i, rate) sum += log(json_number_value(rate));
    return sum / (double)json_array_size(rates);
}

int main(int argc, char **argv) {
    if (argc != 6 && argc != 8 && argc != 9) {
        fprintf(stderr, "usage: %s TABLE CONTEXT NEW OUTPUT QPS [W_TTFT W_TPOT [W_THROUGHPUT]]\n",
                argv[0]);
        return 2;
    }
    json_error_t error;
    json_t *table = json_load_file(argv[1], 0, &error);
    if (!table || number(table, "version") != 1) {
        fprintf(stderr, "%s: %s\n", argv[1], table ? "not of version 1" : error.text);
        return 2;
    }
    double w_ttft = argc > 6 ? atof(argv[6]) : 1, w_tpot = argc > 6 ? atof(argv[7]) : 1;
    double w_throughput = argc == 9 ? atof(argv[8]) : 0;
    const json_t *axes = json_object_get(table, "axes"), *cell, *bins;
    long at[4];
    for (int i = 0; i < 4; i++)
        if ((at[i] = bin_of(json_object_get(axes, AXES[i]), atof(argv[2 + i]))) < 0) {
            printf("beyond %s\n", AXES[i]);
            return 1;
        }
    size_t i;
    json_array_foreach(json_object_get(table, "cells"), i, cell) {
        int found = 1;
        bins = json_object_get(cell, "bins");
        for (int j = 0; j < 4; j++) found &= json_integer_value(json_array_get(bins, j)) == at[j];
        if (!found) continue;
        double saved = 1 - median(cell, "local", "ttft_ms") / median(cell, "remote", "ttft_ms");
        double lost = median(cell, "local", "tpot_ms") / median(cell, "remote", "tpot_ms") - 1;
        double score = w_ttft * saved - w_tpot * lost;
        if (w_throughput != 0) {
            double more = log_throughput(cell, "local") - log_throughput(cell, "remote");
            if (isnan(more)) {
                fprintf(stderr, "%s: it has no throughput\n", argv[1]);
                return 2;
            }
            score += w_throughput * (exp(more) - 1);
        }
        printf("%s score=%.6f ttft_saved=%.6f tpot_lost=%.6f\n", score > 0 ? "local" : "remote",
               score, saved, lost);
        return 0;
    }
    return 2;
}
