/*
The kill storm of test/torture.py in short: every kind of round once, the same kills every time as far as the clock
allows. `make torture` is the long one.
*/
#include "test_util.h"

enum { LEFT_OUT = 77 };  // its status where a round is not possible: nobody may mount a file system

static void storm(const char* rounds, int kills) {
    char* command = text("python3 test/torture.py --seed 1 --steps 80 --kills %d --rounds %s", kills, rounds);
    int status = system(command);
    free(command);
    if (WIFEXITED(status) && WEXITSTATUS(status) == LEFT_OUT) { skip(); }
    assert_int_equal(status, 0);
}

static void test_kills(void** state) {
    (void)state;
    storm("kills", 10);
}

static void test_evaluate_beside(void** state) {
    (void)state;
    storm("evaluate", 10);
}

static void test_full_disk(void** state) {
    (void)state;
    storm("disk", 8);
}

static void test_file_limit(void** state) {
    (void)state;
    storm("limit", 5);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kills),
        cmocka_unit_test(test_evaluate_beside),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_file_limit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
